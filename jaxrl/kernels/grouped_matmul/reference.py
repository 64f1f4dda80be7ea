"""Reference grouped matrix product."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8


def grouped_matmul_reference(
    x: Float[Array, "M D"],
    w: Float[Array, "*L E F D"] | Int8[Array, "*L E F D"],
    sizes: Int[Array, "E"],
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "M F"]:
    """Every row times a copy of its group's matrix; M x F x D weights exist at one time."""
    w = w if layer is None else w[layer]
    row = jnp.arange(x.shape[0])
    group = jnp.searchsorted(jnp.cumsum(sizes), row, side="right")
    own = w[jnp.minimum(group, w.shape[0] - 1)].astype(x.dtype)
    y = jnp.einsum("MD,MFD->MF", x, own, preferred_element_type=jnp.float32)
    return jnp.where(row[:, None] < jnp.sum(sizes), y, 0.0).astype(x.dtype)
