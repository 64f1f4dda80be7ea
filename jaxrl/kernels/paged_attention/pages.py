"""Writes of new keys and values into the page pool."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.bits import materialize
from jaxrl.kernels.quantized import Quantized, quantize
from sharding import Rules, target_platform

Pages = jax.Array | Quantized  # [P, K, page, H]


def write_pages(
    k_pages: Pages,
    v_pages: Pages | None,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"] | None,
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    *,
    rules: Rules,
) -> tuple[Pages, Pages | None]:
    """The pools after writing the keys and values of (b, t) to their pages.

    Without a pool of values, keys only.

    Position -1 is padding and writes nothing. Quantized pages get one scale per head and token.
    """
    n_pages, _, page_len, _ = k_pages.shape
    column = jnp.maximum(positions, 0) // page_len
    page = jnp.take_along_axis(page_table, column, axis=1)
    page = jnp.where(positions >= 0, page, n_pages)  # out of bounds: dropped
    offset = positions % page_len

    def place(pages, new):
        out = rules.spec(None, "kv_heads", *(None,) * (pages.ndim - 2))
        if target_platform() == "tpu":
            heads = rules.spec(None, None, "kv_heads")
            specs = out, heads, jax.P(), jax.P()
            local = jax.shard_map(_write_rows, in_specs=specs, out_specs=out, check_vma=False)
            return local(pages, jax.reshard(new, heads), page, offset)
        return pages.at[page, :, offset].set(new, mode="drop", out_sharding=out)

    def write(pages, new):
        if isinstance(pages, Quantized):
            new = quantize(
                materialize(new), n_shared=1, dtype=pages.dtype, scale_dtype=pages.scale.dtype
            )
            return jax.tree.map(place, pages, new)
        return place(pages, new.astype(pages.dtype))

    return write(k_pages, k), None if v_pages is None else write(v_pages, v)


def _write_rows(pages: jax.Array, new: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    """Writes head by head into the pool as a list of rows.

    Writing all heads at once, XLA would choose another layout of the pool and copy it before and
    after. Scales are written within the rows of their pages.
    """
    _, K, page_len, *rest = pages.shape
    if not rest:
        rows = pages.reshape(-1, page_len)
        row = page[..., None] * K + jnp.arange(K)
        return rows.at[row, offset[..., None]].set(new, mode="drop").reshape(pages.shape)
    row = (page[..., None] * K + jnp.arange(K)) * page_len + offset[..., None]
    rows = pages.reshape(-1, *rest).at[row.reshape(-1)].set(new.reshape(-1, *rest), mode="drop")
    return rows.reshape(pages.shape)
