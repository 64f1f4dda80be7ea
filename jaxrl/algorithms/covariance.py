"""The tokens of a mini-batch whose logprob and advantage go together most: they drive the fall of entropy.

Covariance of a token: (logp - mean logp) (A - mean A), https://arxiv.org/abs/2505.22617, section 4. It is
taken over all response tokens of a mini-batch at once, on the host and with the logprobs of the policy that
sampled, so that it does not depend on how the mini-batch is cut into micro-batches. N tokens.
"""

import numpy as np
from jaxtyping import Bool, Float

Flat = Float[np.ndarray, " N"]


def covariances(logp: Flat, advantages: Flat) -> Flat:
    """(logp - mean(logp)) (A - mean(A)) of every token."""
    x, y = logp.astype(np.float64), advantages.astype(np.float64)
    return ((x - x.mean()) * (y - y.mean())).astype(np.float32)


def pick_between(
    cov: Flat, *, fraction: float, low: float, high: float, rng: np.random.Generator
) -> Bool[np.ndarray, " N"]:
    """Random tokens of those with low < cov < high, `fraction` of all N and at least one: Clip-Cov."""
    among = np.flatnonzero((cov > low) & (cov < high))
    chosen = rng.permutation(among)[: max(int(fraction * len(cov)), 1)]
    return np.isin(np.arange(len(cov)), chosen)


def pick_largest(cov: Flat, *, fraction: float) -> Bool[np.ndarray, " N"]:
    """The `fraction` of all N tokens with the largest covariance, at least one; ties go to the first: KL-Cov."""
    chosen = np.argsort(-cov, kind="stable")[: max(int(fraction * len(cov)), 1)]
    return np.isin(np.arange(len(cov)), chosen)
