"""Paged attention by columns of the page table: 64 keys of every row at a time.

Blocks and arithmetic are those of training attention (kernels/attention/online_softmax.py). A token
gets the same bits from pages as from a packed row whose segment starts on a multiple of 64. On CPU,
decode reads the pages in place (kernels/cpu); other platforms gather a block first.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.online_softmax import (
    BLOCK,
    add_block,
    init_softmax,
    normalize,
    pad_axis,
)
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.cpu import ops
from jaxrl.kernels.paged_attention.pages import Pages
from jaxrl.kernels.quantized import dequantize
from jaxrl.kernels.shard_attention import shard_paged_attention
from jaxrl.kernels.sinks import add_sinks, row_sinks
from sharding import target_platform


def paged_attention_columns(
    q: Float[Array, "B T N H"],
    k_pages: Pages,
    v_pages: Pages | None,
    *,
    spec: AttentionSpec,
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    window: int | Int[Array, ""],
    sinks: Float[Array, "N"] | None = None,
    ahead: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v over the keys at positions 0..p of the row's pages.

    The loop runs from the earliest key inside a window to the largest position. Raises ValueError
    if the page length is not a multiple of 64.
    """
    if k_pages.shape[2] % BLOCK:
        raise ValueError(
            f"pages of {k_pages.shape[2]} tokens do not divide into blocks of {BLOCK} keys; "
            f"set config.rollout.page_len to a multiple of {BLOCK}"
        )
    attend = functools.partial(_local_attention, spec)
    return shard_paged_attention(
        attend,
        q,
        k_pages,
        v_pages,
        page_table,
        positions,
        ahead,
        window=window,
        sinks=sinks,
        rules=spec.rules,
    )


def _local_attention(
    spec: AttentionSpec, q, k_pages, v_pages, page_table, positions, ahead, window, sinks
):
    B, T, N, H = q.shape
    K, page_len = k_pages.shape[1:3]
    v_pages = k_pages if v_pages is None else v_pages
    G = N // K
    rows = q.astype(jnp.float32).reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(B, K, T * G, H)
    if T * G == 1:  # XLA on CPU uses another algorithm for a product with one row
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 1), (0, 0)))
    M = rows.shape[2]

    def of_rows(a):
        return jnp.pad(jnp.repeat(a, G, axis=1), ((0, 0), (0, M - T * G)), constant_values=-1)

    own = of_rows(positions)
    last = own if ahead is None else of_rows(ahead)
    first = jnp.where(window > 0, jnp.maximum(own - window + 1, 0), 0)
    if spec.softcap is None and ops.supports_paged_attention(rows, k_pages):
        state = ops.paged_attention(rows, k_pages, v_pages, page_table, first, last, spec.scale)
    else:
        low = jnp.min(jnp.where(last >= 0, first, jnp.iinfo(jnp.int32).max)) // BLOCK
        high = jnp.max(last) // BLOCK + 1

        def column(j, state):
            page, offset = j * BLOCK // page_len, j * BLOCK % page_len
            pages = lax.dynamic_index_in_dim(page_table, page, axis=1, keepdims=False)
            key = j * BLOCK + jnp.arange(BLOCK)
            visible = (key >= first[..., None]) & (key <= last[..., None])
            k, v = (_key_block(pool, pages, offset) for pool in (k_pages, v_pages))
            v = pad_axis(v, 3, BLOCK)
            return add_block(state, rows, k, v, visible[:, None], spec)

        state = lax.fori_loop(low, high, column, init_softmax((B, K, M), H + -H % BLOCK))
    if (sinks := row_sinks(sinks, K, T)) is not None:
        sinks = jnp.pad(sinks, ((0, 0), (0, M - T * G)))
    out, _ = add_sinks(*normalize(state), sinks)
    out = out[:, :, : T * G, :H].reshape(B, K, T, G, H).transpose(0, 2, 1, 3, 4)
    return out.reshape(B, T, N, H).astype(q.dtype)


def _key_block(pool, pages, offset):
    """float32 [B, K, 64, H]: 64 keys from `offset` on, of one page per row."""

    def block(array):
        if target_platform() == "tpu":
            return _block_rows(array, pages, offset)
        size = (1, array.shape[1], BLOCK, *array.shape[3:])
        at = (0, offset, *(0,) * (array.ndim - 3))
        return jax.vmap(lambda page: lax.dynamic_slice(array, (page, *at), size)[0])(pages)

    return dequantize(jax.tree.map(block, pool))


def _block_rows(
    array: jax.Array, pages: Int[Array, "B"], offset: Int[Array, ""] | int
) -> jax.Array:
    """[B, K, 64, ...]: the same keys, gathered head by head from the pool as a list of blocks.

    For parts of pages, XLA would choose another layout of the pool and copy it. Scales, which have
    no head dimension, are gathered by page.
    """
    P, K, page_len, *rest = array.shape
    if not rest:
        return lax.dynamic_slice_in_dim(array[pages], offset, BLOCK, axis=2)
    n = page_len // BLOCK
    blocks = array.reshape(P * K * n, BLOCK, *rest)
    return blocks[(pages[:, None] * K + jnp.arange(K)) * n + offset // BLOCK]
