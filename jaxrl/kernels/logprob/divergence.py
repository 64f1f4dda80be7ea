"""The generalised Jensen-Shannon divergence of two distributions p and q, term by term.

D = β KL(q | m) + (1 - β) KL(p | m) with m = β q + (1 - β) p, for 0 < β < 1; KL(q | p) for β = 0 and
KL(p | q) for β = 1, which are its limits divided by β or 1 - β. GKD, eq. 1,
https://arxiv.org/abs/2306.13649. p is the policy, which has the gradient.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def mixture(
    logp: Float[Array, "*B V"], logq: Float[Array, "*B V"], beta: float
) -> Float[Array, "*B V"]:
    """log m for 0 < β < 1."""
    return jnp.logaddexp(logp + math.log1p(-beta), logq + math.log(beta))


def terms(
    logp: Float[Array, "*B V"], logq: Float[Array, "*B V"], beta: float
) -> Float[Array, "*B V"]:
    """The summands of D over the ids."""
    if beta == 0.0:
        return jnp.exp(logq) * (logq - logp)
    if beta == 1.0:
        return jnp.exp(logp) * (logp - logq)
    logm = mixture(logp, logq, beta)
    of_q = beta * jnp.exp(logq) * (logq - logm)
    return of_q + (1.0 - beta) * jnp.exp(logp) * (logp - logm)


def of_top_k(
    logp: Float[Array, "*B k"],
    logq: Float[Array, "*B k"],
    beta: float,
    counted: Bool[Array, "*B k"] | None = None,
) -> Float[Array, "*B"]:
    """D over k ids and one bucket for all others, from the logprobs of these ids.

    `counted` is False at ids that are not compared, such as a second one of its kind; their
    logprobs must be finite.
    """
    if counted is None:
        p, q = (jnp.concatenate([x, _rest(x)], axis=-1) for x in (logp, logq))
        return jnp.sum(terms(p, q, beta), axis=-1)
    of_ids = jnp.where(counted, terms(logp, logq, beta), 0.0)
    p, q = (_rest(jnp.where(counted, x, -jnp.inf)) for x in (logp, logq))
    return jnp.sum(of_ids, axis=-1) + terms(p, q, beta)[..., 0]


def _rest(logp: Float[Array, "*B k"]) -> Float[Array, "*B 1"]:
    """log(1 - Σ p), of a rest of at least 1e-7."""
    mass = jax.nn.logsumexp(logp, axis=-1, keepdims=True)
    return jnp.log(-jnp.expm1(jnp.minimum(mass, -1e-7)))


def centre_terms(
    logp: Float[Array, "*B V"], logq: Float[Array, "*B V"], beta: float
) -> Float[Array, "*B V"]:
    """The summands of KL(p | m), about which the gradient is centred; for 0 < β < 1."""
    return jnp.exp(logp) * (logp - mixture(logp, logq, beta))


def logits_gradient(
    logp: Float[Array, "*B V"],
    logq: Float[Array, "*B V"],
    centre: Float[Array, "*B 1"],
    beta: float,
) -> Float[Array, "*B V"]:
    """dD / d logits of p for β < 1, with the sum of `centre_terms`.

    (1 - β) p (log p - log m - KL(p | m)); p - q for β = 0, which needs no centre.
    """
    p = jnp.exp(logp)
    if beta == 0.0:
        return p - jnp.exp(logq)
    return (1.0 - beta) * p * (logp - mixture(logp, logq, beta) - centre)
