"""Bounds on per-token logarithms, which keep exponentials finite."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def clamp(x: Float[Array, "B T"], bound: float) -> Float[Array, "B T"]:
    """x within ± `bound`, with gradient 0 outside; x itself if `bound` is 0."""
    return jnp.clip(x, -bound, bound) if bound else x


def outside(x: Float[Array, "B T"], bound: float) -> Float[Array, "B T"]:
    """1 at tokens that `clamp` changes, 0 elsewhere."""
    return (jnp.abs(x) > bound).astype(jnp.float32) if bound else jnp.zeros_like(x)
