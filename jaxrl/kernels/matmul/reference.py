"""Reference matrix products."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def matmuls_reference(
    x: jax.Array, weights: Sequence[jax.Array], out_shardings: Sequence[jax.P], dtype=None
) -> list[jax.Array]:
    """y_bto = sum over i of x_bti w_oi, with float32 sums of unrounded products."""
    ys = [
        jnp.einsum(
            "BTI,OI->BTO",
            x,
            w.astype(x.dtype),
            preferred_element_type=jnp.float32,
            precision="highest",
            out_sharding=out,
        )
        for w, out in zip(weights, out_shardings, strict=True)
    ]
    return [y.astype(dtype or x.dtype) for y in ys]
