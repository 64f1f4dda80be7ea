"""Writing new keys and values into the pages of a pool."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding import Rules


def write_pages(
    k_pages: Float[Array, "P K page H"],
    v_pages: Float[Array, "P K page H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    *,
    rules: Rules,
) -> tuple[Float[Array, "P K page H"], Float[Array, "P K page H"]]:
    """Writes the key of (b, t) to its page; position -1 is padding and writes nothing."""
    n_pages, _, page_len, _ = k_pages.shape
    column = jnp.maximum(positions, 0) // page_len
    page = jnp.take_along_axis(page_table, column, axis=1)
    page = jnp.where(positions >= 0, page, n_pages)  # out of bounds: dropped
    offset = positions % page_len
    out = rules.spec(None, "kv_heads", None, None)

    def write(pages, new):
        new = new.astype(pages.dtype)
        return pages.at[page, :, offset].set(new, mode="drop", out_sharding=out)

    return write(k_pages, k), write(v_pages, v)
