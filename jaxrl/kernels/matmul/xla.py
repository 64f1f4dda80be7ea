"""Matrix products by XLA."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sharding import target_platform


def matmuls_xla(
    x: jax.Array, weights: Sequence[jax.Array], out_shardings: Sequence[jax.P], dtype=None
) -> list[jax.Array]:
    """One einsum per weight."""
    return [_matmul(x, w, out, dtype) for w, out in zip(weights, out_shardings, strict=True)]


def _matmul(x: jax.Array, w: jax.Array, out_sharding: jax.P, dtype) -> jax.Array:
    if w.dtype == jnp.int8:
        # The barrier ties the conversion to x: otherwise XLA hoists it out of loops and keeps the
        # converted weights.
        x, w = jax.lax.optimization_barrier((x, w))
        w = w.astype(x.dtype)
    eq = "BTI,OI->BTO"
    one_output = w.shape[0] == 1 and target_platform() == "cpu"
    if one_output:  # XLA's product would have bits that depend on the number of rows
        x, w = jax.lax.optimization_barrier((x, jnp.pad(w, ((0, 1), (0, 0)))))
    y = jnp.einsum(eq, x, w, out_sharding=out_sharding, preferred_element_type=dtype)
    return y[..., :1] if one_output else y
