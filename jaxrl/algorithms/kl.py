"""Per-token estimators of KL(policy | reference) from one sampled token, d = logp - ref_logp.

Values, for tokens sampled from the policy (Schulman, http://joschu.net/blog/kl-approx.html):
k1 and k3 are unbiased, k2 and abs are not; k2 and k3 have much less variance than k1.

Gradients, if the estimator is differentiated as a loss (kl_in = "loss"), are another matter:

| name | gradient with respect to logp | in expectation on policy |
|---|---|---|
| k1 | 1 | zero: it regularises nothing |
| abs | sign(d) | the total variation's, not the KL's |
| k2 | d | the gradient of KL(policy, reference) |
| k3 | 1 - exp(-d) | the gradient of the forward KL(reference, policy) |
| k3_unbiased | r (k3 + 1 - exp(-d)) | the gradient of KL(policy, reference), also off policy |
| full | exact | the gradient of KL(policy, reference), without sampling noise |
| jsd | exact | that of a divergence between KL(reference, policy) and KL(policy, reference) |
| name+ | d, as k2 | the gradient of KL(policy, reference) |

A name with "+" has the value of the estimator and the gradient of k2 (straight-through): it reports
a low-variance or unbiased KL and has the gradient of KL(policy, reference). "full+" has the value
of full.

In the reward (kl_in = "reward") the policy gradient is E[value ∇ logp]. The gradient of
KL(policy, reference) is E[d ∇ logp], so k1 is right there and jaxrl/config refuses all others: near
the reference k2 and k3 are of second order in d, and their gradient vanishes.

`full` and `jsd` need both distributions over the whole vocabulary, which kernels/logprob computes
(`exact_kl`).
"""

import dataclasses
from collections.abc import Callable

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
    """|d| with slope 0 at 0, where jnp.abs has slope 1.

    Two equal models must not get a gradient that pushes them apart.
    """
    return d * stop_gradient(jnp.sign(d))


def k2(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """(logp - ref_logp)² / 2."""
    return 0.5 * jnp.square(logp - ref_logp)


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(ref_logp - logp) - 1 - (ref_logp - logp): GRPO, eq. 4 (https://arxiv.org/abs/2402.03300)."""
    # expm1 keeps small values: exp(x) - 1 - x would lose all digits if the two models agree.
    return jnp.expm1(ref_logp - logp) - (ref_logp - logp)


def k3_unbiased(
    log_ratio: Float[Array, "B T"], logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """r k3 with the importance ratio r = exp(log_ratio), which is differentiated too.

    DeepSeek-V3.2, section 3.1 (https://arxiv.org/abs/2512.02556): value and gradient are unbiased
    for tokens sampled from the old policy. On policy the gradient is k2's.
    """
    return jnp.exp(log_ratio) * k3(logp, ref_logp)


def straight_through(
    value: Float[Array, "B T"], gradient: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """`value` with the gradient of `gradient`: gradient + sg(value - gradient)."""
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


def full(exact_kl: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """The exact KL over the vocabulary."""
    return exact_kl


def jsd(exact_kl: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """The generalised Jensen-Shannon divergence over the vocabulary, of `algorithm.kl_beta`.

    GKD, eq. 1 (https://arxiv.org/abs/2306.13649); kernels/logprob/divergence.py has its terms.
    """
    return exact_kl


def full_plus(
    exact_kl: Float[Array, "B T"], logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Value of full, gradient of k2."""
    return straight_through(exact_kl, k2(logp, ref_logp))


@dataclasses.dataclass(frozen=True)
class KLEstimator:
    """One row of `KL_ESTIMATORS`: the estimator and what it reads."""

    function: Callable[..., Float[Array, "B T"]]
    inputs: tuple[str, ...] = ("logp", "ref_logp")  # the function's array arguments, in order
    hyper_parameters: tuple[str, ...] = ()  # keys of config.algorithm


KL_ESTIMATORS = {
    "k1": KLEstimator(k1),
    "abs": KLEstimator(absolute),
    "k2": KLEstimator(k2),
    "k3": KLEstimator(k3),
    "k3_unbiased": KLEstimator(k3_unbiased, ("log_ratio", "logp", "ref_logp")),
    "full": KLEstimator(full, ("exact_kl",)),
    "jsd": KLEstimator(jsd, ("exact_kl",)),
    "k1+": KLEstimator(k1_plus),
    "abs+": KLEstimator(absolute_plus),
    "k2+": KLEstimator(k2),
    "k3+": KLEstimator(k3_plus),
    "full+": KLEstimator(full_plus, ("exact_kl", "logp", "ref_logp")),
}
