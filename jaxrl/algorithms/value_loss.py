"""The loss of a critic's values, per token."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    *,
    clip: float,
) -> Float[Array, "B T"]:
    """L = max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²) / 2: a value that moved by more than ε towards
    R gives no gradient. With ε = 0 it is (V - R)² / 2.

    PPO, eq. 9 (https://arxiv.org/abs/1707.06347), with the clipping of its authors' code
    (https://arxiv.org/abs/2005.12729, section 3).
    """
    loss = jnp.square(values - returns)
    if clip:
        loss = jnp.maximum(loss, jnp.square(near(values, old_values, clip) - returns))
    return 0.5 * loss


def clipped(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    *,
    clip: float,
) -> Float[Array, "B T"]:
    """1 at the values that `value_loss` gives no gradient."""
    if not clip:
        return jnp.zeros_like(values)
    held = jnp.square(near(values, old_values, clip) - returns)
    return (held > jnp.square(values - returns)).astype(jnp.float32)


def near(values, old_values, clip: float) -> Float[Array, "B T"]:
    return old_values + jnp.clip(values - old_values, -clip, clip)
