"""Weights for tokens that another policy sampled than the one whose gradient is taken.

d = old_logp - rollout_logp: the trainer's logprob of the policy that sampled, less the engine's. They differ by
arithmetic (mismatch) and, where samples are older than the weights, by staleness. A weight stands beside the
policy loss of its token and has no gradient. A token of weight 0 stays in the denominator of the mean.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.segment import segment_mean, segment_sum


def token_tis(log_ratio: Float[Array, "B T"], *, high: float) -> Float[Array, "B T"]:
    """min(exp(d), high): truncated importance sampling per token (https://fengyao.notion.site/off-policy-rl)."""
    return jnp.minimum(jnp.exp(log_ratio), high)


def seq_tis(
    log_ratio: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    high: float,
) -> Float[Array, "B T"]:
    """min(exp(Σ_t d_t), high) of the whole response, at each of its tokens: unbiased but for the truncation
    (https://richardli.xyz/rl-collapse)."""
    total = segment_sum(jnp.where(mask > 0, log_ratio, 0.0), segments)
    return jnp.minimum(jnp.exp(total), high)


def icepop(log_ratio: Float[Array, "B T"], *, low: float, high: float) -> Float[Array, "B T"]:
    """exp(d) where low <= exp(d) <= high, else 0: masked importance sampling, IcePop
    (https://ringtech.notion.site/icepop)."""
    ratio = jnp.exp(log_ratio)
    return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def geo_mean_rejection(
    log_ratio: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    low: float,
    high: float,
) -> Float[Array, "B T"]:
    """1 where low <= exp(mean_t d_t) <= high over the response, else 0 at all of its tokens: the geometric mean
    does not shrink with the length as the product does (https://richardli.xyz/rl-collapse)."""
    ratio = jnp.exp(segment_mean(log_ratio, mask, segments))
    return ((ratio >= low) & (ratio <= high)).astype(jnp.float32)


WEIGHTS = {"token_tis": token_tis, "seq_tis": seq_tis, "icepop": icepop}
REJECTIONS = {"geo_mean": geo_mean_rejection}
