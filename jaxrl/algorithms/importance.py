"""Importance weights for tokens whose sampling distribution differs from the trained policy.

d = old_logp - rollout_logp: the trainer's logprob under the policy that sampled the token, minus
the engine's. The two differ by arithmetic (mismatch) and, for samples older than the weights, by
staleness. A weight multiplies the policy loss of its token and has no gradient. A token of weight 0
stays in the denominator of the mean. The last functions measure the mismatch itself.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.kl import k3
from jaxrl.algorithms.segment import segment_mean, segment_sum


def unweighted(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """1 at every token."""
    return jnp.ones_like(log_ratio)


def token_tis(log_ratio: Float[Array, "B T"], *, correction_high: float) -> Float[Array, "B T"]:
    """min(exp(d), high): truncated importance sampling per token.

    https://fengyao.notion.site/off-policy-rl
    """
    return jnp.minimum(jnp.exp(log_ratio), correction_high)


def seq_tis(
    log_ratio: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    correction_high: float,
) -> Float[Array, "B T"]:
    """min(exp(Σ_t d_t), high) over the response, at each of its tokens.

    Unbiased except for the truncation (https://richardli.xyz/rl-collapse).
    """
    total = segment_sum(jnp.where(mask > 0, log_ratio, 0.0), segments)
    return jnp.minimum(jnp.exp(total), correction_high)


def icepop(
    log_ratio: Float[Array, "B T"], *, correction_low: float, correction_high: float
) -> Float[Array, "B T"]:
    """exp(d) if low <= exp(d) <= high, else 0: masked importance sampling, IcePop.

    https://ringtech.notion.site/icepop
    """
    ratio = jnp.exp(log_ratio)
    return jnp.where((ratio >= correction_low) & (ratio <= correction_high), ratio, 0.0)


def geo_mean_rejection(
    log_ratio: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    rejection_low: float,
    rejection_high: float,
) -> Float[Array, "B T"]:
    """1 if low <= exp(mean_t d_t) <= high over the response, else 0 at all of its tokens.

    Unlike the product, the geometric mean does not shrink with the length of the response
    (https://richardli.xyz/rl-collapse).
    """
    ratio = jnp.exp(segment_mean(log_ratio, mask, segments))
    return ((ratio >= rejection_low) & (ratio <= rejection_high)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ImportanceWeight:
    """One row of `CORRECTIONS` or `REJECTIONS`: a function that gives every token a weight."""

    function: Callable[..., Float[Array, "B T"]]
    inputs: tuple[str, ...] = ("log_ratio",)  # names of the function's array arguments, in order
    hyper_parameters: tuple[str, ...] = ()  # keys of config.algorithm


RESPONSE_INPUTS = ("log_ratio", "mask", "segments")

CORRECTIONS = {
    "none": ImportanceWeight(unweighted),
    "token_tis": ImportanceWeight(token_tis, hyper_parameters=("correction_high",)),
    "seq_tis": ImportanceWeight(seq_tis, RESPONSE_INPUTS, ("correction_high",)),
    "icepop": ImportanceWeight(icepop, hyper_parameters=("correction_low", "correction_high")),
}

REJECTIONS = {
    "none": ImportanceWeight(unweighted),
    "geo_mean": ImportanceWeight(
        geo_mean_rejection, RESPONSE_INPUTS, ("rejection_low", "rejection_high")
    ),
}


def logp_diff(logp: Float[Array, "B T"], rollout_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """|logp - rollout_logp|: how far the engine's logprob is from the trainer's."""
    return jnp.abs(logp - rollout_logp)


def rollout_kl(logp: Float[Array, "B T"], rollout_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """k3 estimate of KL(engine | trainer), on tokens that the engine sampled.

    The distance that off-policy analyses of rollout engines use
    (https://fengyao.notion.site/off-policy-rl).
    """
    return k3(rollout_logp, logp)
