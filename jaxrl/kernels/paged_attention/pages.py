"""Writing new keys and values into the pages of a pool."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.bits import settle
from jaxrl.kernels.quantized import Quantized, quantize
from sharding import Rules

Pages = jax.Array | Quantized  # [P, K, page, H]


def write_pages(
    k_pages: Pages,
    v_pages: Pages,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    *,
    rules: Rules,
) -> tuple[Pages, Pages]:
    """Writes the key of (b, t) to its page; position -1 is padding and writes nothing. Pages in 8 bits get a
    scale for every head of a token."""
    n_pages, _, page_len, _ = k_pages.shape
    column = jnp.maximum(positions, 0) // page_len
    page = jnp.take_along_axis(page_table, column, axis=1)
    page = jnp.where(positions >= 0, page, n_pages)  # out of bounds: dropped
    offset = positions % page_len

    def place(pages, new):
        out = rules.spec(None, "kv_heads", *(None,) * (pages.ndim - 2))
        return pages.at[page, :, offset].set(new, mode="drop", out_sharding=out)

    def write(pages, new):
        if isinstance(pages, Quantized):
            new = quantize(
                settle(new), n_shared=1, dtype=pages.dtype, scale_dtype=pages.scale.dtype
            )
            return jax.tree.map(place, pages, new)
        return place(pages, new.astype(pages.dtype))

    return write(k_pages, k), write(v_pages, v)
