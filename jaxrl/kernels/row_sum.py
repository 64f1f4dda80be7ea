"""A sum over the last axis whose bits do not depend on the company of a row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MIN_SIZE = 4096  # elements


def row_sum(x: Float[Array, "*B M S"]) -> Float[Array, "*B M"]:
    """Σ over the last axis; a row gives the same bits among any number of other rows.

    XLA on CPU adds in one order below 4096 elements and in another above, and again in another where
    it fuses what computes `x` into the sum. So small inputs are padded with rows of zeros, and `x` is
    a value of its own. Elsewhere this is a plain sum.
    """
    if jax.default_backend() != "cpu":
        return jnp.sum(x, axis=-1)
    rows, copies = x.shape[-2], -(-MIN_SIZE // max(x.size, 1))
    if copies > 1:  # a multiple of the rows keeps a sharded axis even
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, rows * (copies - 1)), (0, 0)))
    return jnp.sum(jax.lax.optimization_barrier(x), axis=-1)[..., :rows]
