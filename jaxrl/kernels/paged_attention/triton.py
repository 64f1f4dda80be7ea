"""Paged attention on NVIDIA GPUs: a Pallas kernel in Triton that reads each row's own pages.

A program takes a row of queries (one token in decode, a piece of a prompt in prefill), a kv head and a part of the
row's pages; the parts are joined by the logs of their sums (flash decoding, https://arxiv.org/abs/2311.01282).
Scores, softmax and sums are float32, products take the pages' type. Pages in 8 bits are read as they are: they become
the queries' type on the way into a product, and their scales meet the scores, or the weights of the values.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.blocks import MASKED
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.paged_attention.pages import Pages
from jaxrl.kernels.paged_attention.rows import join_rows, split_rows
from jaxrl.kernels.quantized import Quantized
from jaxrl.kernels.shard_attention import shard_paged_attention

QUERIES = 64  # rows of queries and their heads that a program takes
LEAST = 16  # rows of a product of tensor cores
KEYS = 64  # of a page that are computed with at a time
PROGRAMS = (
    528  # that fill a GPU of 132 multiprocessors: with fewer rows and heads, pages are parted
)


def why_not_triton(k_pages: Pages) -> str | None:
    """What keeps the kernel from these pages."""
    page_len, H = k_pages.shape[2:]
    if not isinstance(k_pages, Quantized) and k_pages.dtype not in (jnp.bfloat16, jnp.float32):
        return f"pages of {k_pages.dtype} (set config.rollout.kv_dtype to 'auto')"
    if page_len % LEAST or page_len & (page_len - 1):
        return f"pages of {page_len} tokens (set config.rollout.page_len to 16, 32, 64, ...)"
    if H < LEAST or H & (H - 1):
        return f"heads of width {H}, no power of two"
    return None


def paged_attention_triton(
    q: Float[Array, "B T N H"],
    k_pages: Pages,
    v_pages: Pages,
    *,
    spec: AttentionSpec,
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    window: int | Int[Array, ""],
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v over the keys at positions 0..p of the row's pages.

    `interpret` runs the kernel's steps by XLA, on any backend. Raises NotImplementedError without a GPU, and for
    pages that it cannot take.
    """
    if not interpret:
        check_platform("config.model.paged_attention", "triton", "gpu")
    if why := why_not_triton(k_pages):
        raise NotImplementedError(
            f"config.model.paged_attention='triton' does not take {why}; or set it to 'auto' or 'columns'"
        )
    attend = functools.partial(_local_attention, spec, interpret)
    return shard_paged_attention(
        attend, q, k_pages, v_pages, page_table, positions, window=window, rules=spec.rules
    )


def _local_attention(
    spec: AttentionSpec, interpret: bool, q, k_pages, v_pages, table, positions, window
):
    K, page_len, H = k_pages.shape[1:]
    pools, dtype = [k_pages, v_pages], k_pages.dtype
    if isinstance(k_pages, Quantized):
        pools, dtype = [k_pages.values, v_pages.values, k_pages.scale, v_pages.scale], q.dtype
    rows = split_rows(
        q.astype(dtype), positions, window,
        n_kv_heads=K, page_len=page_len, most=QUERIES,
        size=lambda M: max(pl.next_power_of_2(M), LEAST),
    )  # fmt: skip
    n_rows, _, M, _ = rows.q.shape
    n_columns = table.shape[1]
    n_parts = min(pl.cdiv(PROGRAMS, n_rows * K), n_columns)
    mean, norm = pl.pallas_call(
        functools.partial(
            _kernel, n_columns=n_columns, n_pieces=n_rows // len(table), n_parts=n_parts,
            spec=spec,
        ),
        grid=(n_rows, K, n_parts),
        in_specs=[
            *[pl.no_block_spec] * 4,
            pl.BlockSpec((None, None, M, H), lambda r, h, s: (r, h, 0, 0)),
            pl.BlockSpec((None, M), lambda r, h, s: (r, 0)),
            *[pl.no_block_spec] * len(pools),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, M, H), lambda r, h, s: (s, r, h, 0, 0)),
            pl.BlockSpec((None, None, None, M), lambda r, h, s: (s, r, h, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((n_parts, n_rows, K, M, H), jnp.float32),
            jax.ShapeDtypeStruct((n_parts, n_rows, K, M), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="paged_attention_triton",
        interpret=interpret,
    )(table.reshape(-1), rows.low, rows.high, rows.reach[None], rows.q, rows.last, *pools)  # fmt: skip
    share = jnp.exp(norm - jnp.max(norm, axis=0))
    share /= jnp.sum(share, axis=0)
    out = jnp.sum(mean * share[..., None], axis=0)
    return join_rows(out, q.shape).astype(q.dtype)


def _kernel(
    table, low, high, reach, q_ref, last_ref, k_pages, v_pages, *scales_and_results,
    n_columns, n_pieces, n_parts, spec: AttentionSpec,
):  # fmt: skip
    """One part of the pages of a row and a kv head: the mean of what it sees, and the log of its sum."""
    *scales, mean_ref, norm_ref = scales_and_results  # no scales where pages are no 8 bits
    row, head, part = (pl.program_id(axis) for axis in range(3))
    page_len = k_pages.shape[2]
    keys = min(KEYS, page_len)
    q, last = q_ref[...], last_ref[...]
    size = lax.div(high[row] - low[row] + n_parts - 1, n_parts)
    start = low[row] + part * size
    end = jnp.minimum(start + size, high[row])

    def block(i, state):
        top, total, mixed = state
        column, offset = start + lax.div(i * keys, page_len), lax.rem(i * keys, page_len)
        page = table[lax.div(row, n_pieces) * n_columns + column]
        own = page, head, pl.ds(offset, keys)
        k, v = (pages[*own, :].astype(q.dtype) for pages in (k_pages, v_pages))
        k_scale, v_scale = (scale[own][None] for scale in scales) if scales else (1.0, 1.0)
        key = column * page_len + offset + jnp.arange(keys)
        seen = (key[None] <= last[:, None]) & (key[None] > last[:, None] - reach[0])
        products = plgpu.dot(q, k, trans_b=True) * k_scale
        scores = jnp.where(seen, spec.scores(products), MASKED)
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, keep = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
        mixed = mixed * keep[:, None] + plgpu.dot((weights * v_scale).astype(v.dtype), v)
        return new, total * keep + jnp.sum(weights, axis=1), mixed

    M, H = q.shape
    empty = jnp.full(M, MASKED), jnp.zeros(M), jnp.zeros((M, H))
    n_blocks = jnp.maximum(end - start, 0) * (page_len // keys)
    top, total, mixed = lax.fori_loop(0, n_blocks, block, empty)
    some = top > MASKED
    total = jnp.where(some, total, 1.0)
    mean_ref[...] = jnp.where(some[:, None], mixed, 0.0) / total[:, None]
    norm_ref[...] = jnp.where(some, top + jnp.log(total), MASKED)
