"""Paged attention on NVIDIA GPUs: a Pallas kernel in Triton that reads only each row's own pages.

A program handles a row of queries (one token in decode, part of a prompt in prefill), a kv head and
a part of the row's pages. The parts are combined by their log-sums (flash decoding,
https://arxiv.org/abs/2311.01282). Scores, softmax and sums are float32; matrix products use the
pages' dtype. Quantized pages are converted to the queries' dtype on load; their scales multiply the
scores, or the softmax weights of the values.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.limits import MIN_ROWS
from jaxrl.kernels.attention.online_softmax import MASKED
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.paged_attention.limits import feature_parts, unsupported_by_triton
from jaxrl.kernels.paged_attention.pages import Pages
from jaxrl.kernels.paged_attention.rows import join_rows, split_rows
from jaxrl.kernels.quantized import Quantized
from jaxrl.kernels.shard_attention import shard_paged_attention
from jaxrl.kernels.sinks import add_sinks, row_sinks

MAX_QUERIES = 64  # tokens x query heads per kv head in one program
KEY_BLOCK = 64  # keys of a page processed at a time; half as many of heads wider than WIDE
WIDE = 256
# Programs that fill a GPU of 132 multiprocessors. Rows x heads that are fewer than two per
# multiprocessor split their pages; more leave out the kernels that combine the parts.
TARGET_PROGRAMS, ENOUGH_PROGRAMS = 528, 264


def paged_attention_triton(
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
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v over the keys at positions 0..p of the row's pages.

    `interpret` emulates the kernel with XLA on any backend. Raises NotImplementedError without a
    GPU and for unsupported pages.
    """
    if not interpret:
        check_platform("config.model.paged_attention", "triton", "gpu")
    if why := unsupported_by_triton(k_pages):
        raise NotImplementedError(
            f"config.model.paged_attention='triton' does not support {why}; or set it to 'auto' or "
            "'columns'"
        )
    attend = functools.partial(_local_attention, spec, interpret)
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


def _max_queries(H: int) -> int:
    """Queries of a program, whose sums are in registers."""
    return MAX_QUERIES if H <= WIDE else MAX_QUERIES // 2


def _local_attention(
    spec: AttentionSpec,
    interpret: bool,
    q,
    k_pages,
    v_pages,
    table,
    positions,
    ahead,
    window,
    sinks,
):
    K, page_len, H = k_pages.shape[1:]
    pages, dtype = [k_pages] if v_pages is None else [k_pages, v_pages], k_pages.dtype
    pools, n_pools = pages, len(pages)
    if isinstance(k_pages, Quantized):
        pools, dtype = [p.values for p in pages] + [p.scale for p in pages], q.dtype
    rows = split_rows(
        q.astype(dtype), positions, window,
        n_kv_heads=K, page_len=page_len, max_queries=_max_queries(H), size=lambda M: M,
        ahead=ahead,
    )  # fmt: skip
    n_rows, _, M, _ = rows.q.shape
    n_columns = table.shape[1]
    scalars = table.reshape(-1), rows.low, rows.high, rows.window[None]
    places = [rows.last] if ahead is None else [rows.last, rows.own]
    split = n_rows * K < ENOUGH_PROGRAMS
    n_parts = min(pl.cdiv(TARGET_PROGRAMS, n_rows * K), n_columns) if split else 1
    whole = n_parts == 1 and sinks is None  # nothing is left to do after the kernel
    mean, norm = pl.pallas_call(
        functools.partial(
            _kernel,
            n_columns=n_columns,
            n_pieces=n_rows // len(table),
            n_parts=n_parts,
            with_own=ahead is not None,
            n_pools=n_pools,
            spec=spec,
        ),
        grid=(n_rows, K, n_parts),
        in_specs=[pl.no_block_spec] * (5 + len(places) + len(pools)),
        out_specs=[pl.no_block_spec] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((n_parts, n_rows, K, M, H), q.dtype if whole else jnp.float32),
            jax.ShapeDtypeStruct((n_parts, n_rows, K, M), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4 if H <= WIDE else 8, num_stages=2),
        name="paged_attention_triton",
        interpret=interpret,
    )(*scalars, rows.q, *places, *pools)
    if n_parts == 1:
        out = mean[0]
    else:
        share = jnp.exp(norm - jnp.max(norm, axis=0))
        share /= jnp.sum(share, axis=0)
        out = jnp.sum(mean * share[..., None], axis=0)
    n_tokens = q.shape[0] * q.shape[1] // n_rows  # of a row
    if (sinks := row_sinks(sinks, K, n_tokens)) is not None:
        out, _ = add_sinks(out, jax.nn.logsumexp(norm, axis=0), sinks)
    return join_rows(out, q.shape).astype(q.dtype)


def _kernel(
    table, low, high, window, q_ref, last_ref, *rest,
    n_columns, n_pieces, n_parts, with_own, n_pools, spec: AttentionSpec,
):  # fmt: skip
    """Mean over the visible keys and its log-sum, for one part of a row's pages and one kv head.

    A product needs a power of two of queries: those past the row's are masked here, because padded
    arrays would be written and read in every layer. It needs one of features too: heads of other
    widths are processed in parts.
    """
    own_refs, pools = rest[:with_own], rest[with_own : with_own + n_pools]
    *scales, mean_ref, norm_ref = rest[with_own + n_pools :]  # scales of quantized pages
    row, head, piece = (pl.program_id(axis) for axis in range(3))
    page_len = pools[0].shape[2]
    M, H = q_ref.shape[2:]
    keys = min(KEY_BLOCK if H <= WIDE else KEY_BLOCK // 2, page_len)
    features = feature_parts(H)
    query = jnp.arange(max(pl.next_power_of_2(M), MIN_ROWS))
    exists = query < M

    def places(start, size):
        return row, head, query[:, None], start + jnp.arange(size)[None]

    q = [plgpu.load(q_ref.at[places(*part)], mask=exists[:, None], other=0) for part in features]
    last, *others = (
        plgpu.load(ref.at[row, query], mask=exists, other=-1) for ref in (last_ref, *own_refs)
    )
    own = others[0] if others else last
    size = lax.div(high[row] - low[row] + n_parts - 1, n_parts)
    start = low[row] + piece * size
    end = jnp.minimum(start + size, high[row])

    def block(i, state):
        max_score, denominator, numerators = state
        column, offset = start + lax.div(i * keys, page_len), lax.rem(i * keys, page_len)
        page = table[lax.div(row, n_pieces) * n_columns + column]
        location = page, head, pl.ds(offset, keys)
        k, *others = (
            [pages[*location, pl.ds(*part)].astype(q[0].dtype) for part in features]
            for pages in pools
        )
        v = others[0] if others else k
        k_scale, v_scale = (scales[i][location][None] if scales else 1.0 for i in (0, -1))
        key = column * page_len + offset + jnp.arange(keys)
        visible = (key[None] <= last[:, None]) & (key[None] > own[:, None] - window[0])
        dots = (plgpu.dot(*pair, trans_b=True) for pair in zip(q, k, strict=True))
        products = functools.reduce(jnp.add, dots)
        scores = jnp.where(visible, spec.scores(products * k_scale), MASKED)
        new = jnp.maximum(max_score, jnp.max(scores, axis=1))
        weights, correction = jnp.exp(scores - new[:, None]), jnp.exp(max_score - new)
        weights_of_values = (weights * v_scale).astype(v[0].dtype)
        numerators = [
            numerator * correction[:, None] + plgpu.dot(weights_of_values, values)
            for numerator, values in zip(numerators, v, strict=True)
        ]
        return new, denominator * correction + jnp.sum(weights, axis=1), numerators

    zeros = [jnp.zeros(part.shape) for part in q]
    empty = jnp.full(query.shape, MASKED), jnp.zeros(query.shape), zeros
    n_blocks = jnp.maximum(end - start, 0) * (page_len // keys)
    max_score, denominator, numerators = lax.fori_loop(0, n_blocks, block, empty)
    any_visible = max_score > MASKED
    denominator = jnp.where(any_visible, denominator, 1.0)
    norm = jnp.where(any_visible, max_score + jnp.log(denominator), MASKED)
    for part, numerator in zip(features, numerators, strict=True):
        mean = jnp.where(any_visible[:, None], numerator, 0.0) / denominator[:, None]
        place = piece, *places(*part)
        plgpu.store(mean_ref.at[place], mean.astype(mean_ref.dtype), mask=exists[:, None])
    plgpu.store(norm_ref.at[piece, row, head, query], norm, mask=exists)
