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
| name+ | d, as k2 | the gradient of KL(policy, reference) |

A name with "+" has the value of the estimator and the gradient of k2 (straight-through): it reports a low-variance
or unbiased KL and still pushes towards the reference in the right measure. "full+" is the value of full.

In the reward (kl_in = "reward") only the value matters, so k1 is the right one there.
`full` needs both distributions over the whole vocabulary: kernels/logprob computes it, not this file.
"""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float


def k1(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """logp - ref_logp."""
    return logp - ref_logp


def absolute(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """|logp - ref_logp|."""
    return magnitude(logp - ref_logp)


def magnitude(d: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """|d| with slope 0 at 0, where jnp.abs has 1: two equal models must not be pushed apart."""
    return d * stop_gradient(jnp.sign(d))


def k2(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """(logp - ref_logp)² / 2."""
    return 0.5 * jnp.square(logp - ref_logp)


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(ref_logp - logp) - 1 - (ref_logp - logp): GRPO, eq. 4 (https://arxiv.org/abs/2402.03300)."""
    # expm1 keeps the small values: exp(x) - 1 - x would lose all digits where the two agree.
    return jnp.expm1(ref_logp - logp) - (ref_logp - logp)


def straight_through(
    value: Float[Array, "B T"], gradient: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """The value of one and the gradient of the other: gradient + sg(value - gradient)."""
    return gradient + stop_gradient(value - gradient)


def k1_plus(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Value of k1, gradient of k2."""
    return straight_through(k1(logp, ref_logp), k2(logp, ref_logp))


def absolute_plus(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Value of abs, gradient of k2."""
    return straight_through(absolute(logp, ref_logp), k2(logp, ref_logp))


def k3_plus(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Value of k3, gradient of k2."""
    return straight_through(k3(logp, ref_logp), k2(logp, ref_logp))


ESTIMATORS = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": k1_plus,
    "abs+": absolute_plus,
    "k2+": k2,
    "k3+": k3_plus,
}
