"""Importance weights for tokens whose sampling distribution differs from the trained policy.

d = trainer's logprob - behavior_logp, the engine's logprob of the distribution that it sampled
from. The trainer's is that of the policy at the start of the step, or of the current policy if the
ratio of the loss already starts at the engine (old_logp = "rollout"). The two differ by arithmetic
(mismatch), by the sampling filters top_k, top_p and min_p and, for samples older than the weights,
by staleness. A weight multiplies the policy loss of its token and has no gradient. A token of
weight 0 stays in the denominator of the mean. The last functions measure the mismatch itself;
rejection.py masks tokens and responses by it.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.kl import k3
from jaxrl.algorithms.losses.aggregation import SumAndWeight, masked_mean
from jaxrl.algorithms.segment import segment_sum


def unweighted(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """1 at every token."""
    return jnp.ones_like(log_ratio)


def token_tis(
    log_ratio: Float[Array, "B T"], *, correction_floor: float, correction_high: float
) -> Float[Array, "B T"]:
    """clip(exp(d), floor, high): truncated importance sampling per token.

    https://fengyao.notion.site/off-policy-rl, which has no floor.
    """
    return jnp.clip(jnp.exp(log_ratio), correction_floor, correction_high)


def seq_tis(
    log_ratio: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    correction_floor: float,
    correction_high: float,
) -> Float[Array, "B T"]:
    """clip(exp(Σ_t d_t), floor, high) over the response, at each of its tokens.

    Unbiased except for the truncation (https://richardli.xyz/rl-collapse).
    """
    return jnp.clip(response_ratio(log_ratio, mask, segments), correction_floor, correction_high)


def icepop(
    log_ratio: Float[Array, "B T"], *, correction_low: float, correction_high: float
) -> Float[Array, "B T"]:
    """exp(d) if low <= exp(d) <= high, else 0: masked importance sampling, IcePop.

    https://ringtech.notion.site/icepop
    """
    return _masked_outside(jnp.exp(log_ratio), correction_low, correction_high)


def seq_icepop(
    log_ratio: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    correction_low: float,
    correction_high: float,
) -> Float[Array, "B T"]:
    """exp(Σ_t d_t) over the response if it is within [low, high], else 0, at each of its tokens.

    Masked importance sampling of whole responses (https://richardli.xyz/rl-collapse).
    """
    ratio = response_ratio(log_ratio, mask, segments)
    return _masked_outside(ratio, correction_low, correction_high)


def response_ratio(
    log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """exp(Σ_t d_t) over the unmasked tokens of the response, at each of its tokens."""
    return jnp.exp(segment_sum(jnp.where(mask > 0, log_ratio, 0.0), segments))


def _masked_outside(ratio, low: float, high: float) -> Float[Array, "B T"]:
    return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@dataclasses.dataclass(frozen=True)
class ImportanceWeight:
    """One row of `CORRECTIONS`: a function that gives every token a weight."""

    function: Callable[..., Float[Array, "B T"]]
    inputs: tuple[str, ...] = ("log_ratio",)  # names of the function's array arguments, in order
    hyper_parameters: tuple[str, ...] = ()  # keys of config.algorithm
    level: Literal["token", "response"] = "token"  # what has one weight


RESPONSE_INPUTS = ("log_ratio", "mask", "segments")
TRUNCATION = ("correction_floor", "correction_high")
BOUNDS = ("correction_low", "correction_high")

CORRECTIONS = {
    "none": ImportanceWeight(unweighted),
    "token_tis": ImportanceWeight(token_tis, hyper_parameters=TRUNCATION),
    "seq_tis": ImportanceWeight(seq_tis, RESPONSE_INPUTS, TRUNCATION, level="response"),
    "icepop": ImportanceWeight(icepop, hyper_parameters=BOUNDS),
    "seq_icepop": ImportanceWeight(seq_icepop, RESPONSE_INPUTS, BOUNDS, level="response"),
}


def mean_weight(
    weights: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    response_len: Float[Array, "B T"],
    *,
    level: str,
) -> SumAndWeight:
    """Mean weight of the tokens, or of the responses if a response has one weight.

    Division by it gives weights of mean 1: self-normalized importance sampling.
    """
    return masked_mean(weights, mask if level == "token" else mask / response_len)


def logp_diff(logp: Float[Array, "B T"], rollout_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """|logp - rollout_logp|: how far the engine's logprob is from the trainer's."""
    return jnp.abs(logp - rollout_logp)


def rollout_kl(logp: Float[Array, "B T"], rollout_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """k3 estimate of KL(engine | trainer), on tokens that the engine sampled.

    The distance that off-policy analyses of rollout engines use
    (https://fengyao.notion.site/off-policy-rl).
    """
    return k3(rollout_logp, logp)
