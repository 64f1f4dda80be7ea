"""Selections of tokens of a mini-batch, before its update: by covariance, or by entropy.

The tokens whose logprob and advantage covary most drive the collapse of the entropy.

Covariance of a token: (logp - mean logp) (A - mean A), https://arxiv.org/abs/2505.22617, section 4.
The means are over all N response tokens of a mini-batch, on the host and with the logprobs of the
policy that sampled, so that the selection does not depend on the split into micro-batches.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

TokenValues = Float[np.ndarray, " N"]
Selected = Bool[np.ndarray, " N"]


def covariances(logp: TokenValues, advantages: TokenValues) -> TokenValues:
    """(logp - mean(logp)) (A - mean(A)) of every token."""
    x, y = logp.astype(np.float64), advantages.astype(np.float64)
    return ((x - x.mean()) * (y - y.mean())).astype(np.float32)


def select_between(
    cov: TokenValues,
    rng: np.random.Generator,
    *,
    cov_fraction: float,
    clip_cov_low: float,
    clip_cov_high: float,
) -> Selected:
    """Random tokens with low < cov < high, `cov_fraction` of all N and at least one: Clip-Cov."""
    candidates = np.flatnonzero((cov > clip_cov_low) & (cov < clip_cov_high))
    chosen = rng.permutation(candidates)[: max(int(cov_fraction * len(cov)), 1)]
    return np.isin(np.arange(len(cov)), chosen)


def select_largest(cov: TokenValues, *, cov_fraction: float) -> Selected:
    """The `cov_fraction` of all N tokens with the largest covariance, at least one: KL-Cov.

    The first of equal tokens is selected.
    """
    chosen = np.argsort(-cov, kind="stable")[: max(int(cov_fraction * len(cov)), 1)]
    return np.isin(np.arange(len(cov)), chosen)


def select_top_entropy(entropies: TokenValues, *, top_entropy: float) -> Selected:
    """Tokens whose entropy is at least the (1 - top_entropy) quantile of all N.

    "Beyond the 80/20 Rule", section 5 (https://arxiv.org/abs/2506.01939): the few tokens at which a
    response can take another way have the largest entropies, and learn alone.
    """
    x = entropies.astype(np.float64)
    return x >= np.quantile(x, 1.0 - top_entropy)


@dataclasses.dataclass(frozen=True)
class TokenSelection:
    """How a policy loss selects tokens of a mini-batch before the update."""

    function: Callable[..., Selected]
    inputs: tuple[str, ...]  # of "cov" and "rng", in the order of the function's arguments
    hyper_parameters: tuple[str, ...]  # keys of config.algorithm


SELECT_BETWEEN = TokenSelection(
    select_between,
    inputs=("cov", "rng"),
    hyper_parameters=("cov_fraction", "clip_cov_low", "clip_cov_high"),
)
SELECT_LARGEST = TokenSelection(select_largest, inputs=("cov",), hyper_parameters=("cov_fraction",))
