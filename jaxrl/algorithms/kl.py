"""Per-token estimators of KL(policy | reference) from one sampled token, d = logp - ref_logp.

Values, for tokens sampled from the policy (Schulman, http://joschu.net/blog/kl-approx.html):
k1 and k3 are unbiased, k2 and abs are not; k3 and k2 have much less variance than k1.

Gradients, where the estimator is differentiated as a loss (kl_in = "loss"), are another matter:

| name | gradient with respect to logp | in expectation on policy |
|---|---|---|
| k1 | 1 | zero: it regularises nothing |
| abs | sign(d) | that of the total variation, not of the KL |
| k2 | d | the gradient of KL(policy, reference) |
| k3 | 1 - exp(-d) | the gradient of the forward KL(reference, policy) |
| full | exact | the gradient of KL(policy, reference), without sampling noise |

In the reward (kl_in = "reward") only the value matters, so k1 is the right one there.
`full` needs both distributions over the whole vocabulary: kernels/logprob computes it, not this file.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def k1(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """logp - ref_logp."""
    return logp - ref_logp


def absolute(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """|logp - ref_logp|."""
    return jnp.abs(logp - ref_logp)


def k2(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """(logp - ref_logp)² / 2."""
    return 0.5 * jnp.square(logp - ref_logp)


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(ref_logp - logp) - 1 - (ref_logp - logp): GRPO, eq. 4 (https://arxiv.org/abs/2402.03300)."""
    # expm1 keeps the small values: exp(x) - 1 - x would lose all digits where the two agree.
    return jnp.expm1(ref_logp - logp) - (ref_logp - logp)


ESTIMATORS = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
