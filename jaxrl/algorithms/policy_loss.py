"""Policy losses. Each returns one loss value per token; masking and averaging happen in aggregate.py."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def ppo_clip(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """Clipped surrogate, max(-r A, -clip(r, 1 - low, 1 + high) A) with r = exp(logp - old_logp).

    PPO, eq. 7 (https://arxiv.org/abs/1707.06347); separate bounds from DAPO, eq. 8
    (https://arxiv.org/abs/2503.14476).
    """
    ratio = jnp.exp(logp - old_logp)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(-ratio * advantages, -clipped * advantages)


def is_clipped(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Bool[Array, "B T"]:
    """Tokens whose gradient `ppo_clip` cuts off: past the bound on the side the advantage pushes to."""
    ratio = jnp.exp(logp - old_logp)
    above = (ratio > 1.0 + clip_high) & (advantages > 0)
    below = (ratio < 1.0 - clip_low) & (advantages < 0)
    return above | below


POLICY_LOSSES = {"ppo_clip": ppo_clip}
