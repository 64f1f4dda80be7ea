"""Grouped matrix product by XLA's ragged_dot."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from jaxrl.kernels.grouped_matmul.stack import grouped_matmul_stack
from sharding import target_platform


def grouped_matmul_ragged(
    x: Float[Array, "M D"],
    w: Float[Array, "*L E F D"] | Int8[Array, "*L E F D"],
    sizes: Int[Array, "E"],
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "M F"]:
    """`jax.lax.ragged_dot`, a native XLA kernel on TPU.

    On CPU and GPU, XLA multiplies every row with every group's matrix and discards the rest: E
    times the work. Results and gradients have the dtype of `x`; a float32 result would take
    gradients in float32, too. With `layer`, a Pallas kernel with the same tiles replaces it on TPU;
    elsewhere the matrices of the layer are copied.
    """
    if layer is not None:
        if target_platform() == "tpu":
            return grouped_matmul_stack(x, w, sizes, layer)
        w = lax.dynamic_index_in_dim(w, layer, keepdims=False)
    return lax.ragged_dot(x, jnp.swapaxes(w.astype(x.dtype), 1, 2), sizes)
