"""Value loss of a critic, per token."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    *,
    clip: float,
) -> Float[Array, "B T"]:
    """L = max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²) / 2, or (V - R)² / 2 with ε = 0.

    A value that moved by more than ε towards R has no gradient. PPO, eq. 9
    (https://arxiv.org/abs/1707.06347), with the clipping of its authors' code
    (https://arxiv.org/abs/2005.12729, section 3).
    """
    loss = jnp.square(values - returns)
    if clip:
        loss = jnp.maximum(loss, jnp.square(clip_values(values, old_values, clip) - returns))
    return 0.5 * loss


def clipped(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    *,
    clip: float,
) -> Float[Array, "B T"]:
    """1 at tokens whose value gets no gradient from `value_loss`, 0 elsewhere."""
    if not clip:
        return jnp.zeros_like(values)
    clipped_error = jnp.square(clip_values(values, old_values, clip) - returns)
    return (clipped_error > jnp.square(values - returns)).astype(jnp.float32)


def clip_values(values, old_values, clip: float) -> Float[Array, "B T"]:
    """Values within `clip` of the old ones."""
    return old_values + jnp.clip(values - old_values, -clip, clip)
