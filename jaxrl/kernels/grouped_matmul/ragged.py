"""Grouped matrix product by XLA's ragged_dot."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8


def grouped_matmul_ragged(
    x: Float[Array, "M D"],
    w: Float[Array, "E F D"] | Int8[Array, "E F D"],
    sizes: Int[Array, "E"],
) -> Float[Array, "M F"]:
    """`jax.lax.ragged_dot`, a native XLA kernel on TPU.

    On CPU and GPU, XLA multiplies every row with every group's matrix and discards the rest: E
    times the work. Results and gradients have the dtype of `x`; a float32 result would take
    gradients in float32, too.
    """
    return lax.ragged_dot(x, jnp.swapaxes(w.astype(x.dtype), 1, 2), sizes)
