"""Arithmetic on CPU whose bits depend on the numbers alone, not on the shapes or programs around them.

Trainer and engine compute the same token among other rows and in other programs. XLA on CPU would
round differently in the two: it contracts a product and a sum in one fusion, and it adds up a row in
an order that depends on the size of the array and on what it fuses with. Elsewhere these functions
are what they look like.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding import target_platform

MIN_SIZE = 4096  # elements; below, sums are added in another order


def materialize(x: jax.Array) -> jax.Array:
    """`x`, rounded to its type before anything is computed from it."""
    return jax.lax.optimization_barrier(x) if target_platform() == "cpu" else x


def row_sum(x: Float[Array, "*B M S"]) -> Float[Array, "*B M"]:
    """Σ over the last axis; a row gives the same bits among any number of other rows."""
    if target_platform() != "cpu":
        return jnp.sum(x, axis=-1)
    rows, copies = x.shape[-2], -(-MIN_SIZE // max(x.size, 1))
    if copies > 1:  # a multiple of the rows keeps a sharded axis even
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, rows * (copies - 1)), (0, 0)))
    return jnp.sum(materialize(x), axis=-1)[..., :rows]
