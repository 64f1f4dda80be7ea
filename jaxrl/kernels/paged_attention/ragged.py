"""Ragged paged attention on TPU: a Pallas kernel that reads only each row's own pages.

A row of queries (one token in decode, part of a prompt in prefill) visits its pages in groups. The
next group, also of the next row, is copied while the present one is processed. Online softmax as in
kernels/attention/online_softmax.py; scores, softmax and sums are float32, matrix products use the
pages' dtype.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.online_softmax import MASKED
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.paged_attention.limits import SUBLANES, unsupported_by_ragged
from jaxrl.kernels.paged_attention.pages import Pages
from jaxrl.kernels.paged_attention.rows import join_rows, split_rows
from jaxrl.kernels.shard_attention import shard_paged_attention

MAX_KEYS = 512  # per group of pages
GROUP_BYTES = 2**20  # keys per group; VMEM (16 MiB) holds two groups of keys and of values
MAX_QUERIES = 512  # tokens x query heads per kv head in one row


def paged_attention_ragged(
    q: Float[Array, "B T N H"],
    k_pages: Pages,
    v_pages: Pages,
    *,
    spec: AttentionSpec,
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    window: int | Int[Array, ""],
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v over the keys at positions 0..p of the row's pages.

    `interpret` emulates the kernel on any backend: True with XLA, where copies complete when they
    are started, and InterpretParams with the memories, copies and semaphores of a TPU. Raises
    NotImplementedError without a TPU and for unsupported pages and page tables.
    """
    if not interpret:
        check_platform("config.model.paged_attention", "ragged", "tpu")
    if why := unsupported_by_ragged(k_pages, page_table):
        raise NotImplementedError(
            f"config.model.paged_attention='ragged' does not support {why}; or set it to 'auto' or "
            "'columns'"
        )
    attend = functools.partial(_local_attention, spec, interpret)
    return shard_paged_attention(
        attend, q, k_pages, v_pages, page_table, positions, window=window, rules=spec.rules
    )


def _local_attention(
    spec: AttentionSpec,
    interpret: bool | pltpu.InterpretParams,
    q,
    k_pages,
    v_pages,
    table,
    positions,
    window,
):
    K, page_len, H = k_pages.shape[1:]
    rows = split_rows(
        q.astype(k_pages.dtype), positions, window,
        n_kv_heads=K, page_len=page_len, max_queries=MAX_QUERIES,
        size=lambda M: M + -M % SUBLANES,
    )  # fmt: skip
    n_rows, _, M, _ = rows.q.shape
    scalars = table.reshape(-1), rows.low, rows.high, rows.window[None]
    fits = GROUP_BYTES // (K * page_len * H * k_pages.dtype.itemsize)
    n = max(min(MAX_KEYS // page_len, fits, table.shape[1]), 1)
    buffer = pltpu.VMEM((2, n, K, page_len, H), k_pages.dtype)
    by_row = pl.BlockSpec((None, K, M, H), lambda r, *_: (r, 0, 0, 0))
    pool = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(
            _kernel, n_columns=table.shape[1], n_pieces=n_rows // len(table), spec=spec
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(n_rows,),
            in_specs=[by_row, pl.BlockSpec((None, M, 1), lambda r, *_: (r, 0, 0)), pool, pool],
            out_specs=by_row,
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((K, M, 1), jnp.float32),
                pltpu.VMEM((K, M, 1), jnp.float32),
                pltpu.VMEM((K, M, H), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((n_rows, K, M, H), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="ragged_paged_attention",
        interpret=interpret,
    )(*scalars, rows.q, rows.last[..., None], k_pages, v_pages)  # fmt: skip
    return join_rows(out, q.shape).astype(q.dtype)


def _kernel(
    table, low, high, window, q_ref, last_ref, k_pages, v_pages, out_ref,
    k_buffer, v_buffer, copies_done, slot_ref, max_ref, denominator_ref, numerator_ref,
    *, n_columns, n_pieces, spec: AttentionSpec,
):  # fmt: skip
    """One row. The buffers and the copies under way persist from one row to the next."""
    b = pl.program_id(0)
    _, n, K, page_len, H = k_buffer.shape

    def each_page(row, group, slot, act):
        """Calls `act` with the copies of the pages in a row's group."""
        for i in range(n):
            column = low[row] + group * n + i

            @pl.when(column < high[row])
            def _(i=i, column=column):
                page = table[row // n_pieces * n_columns + column]
                for pages, buffer in ((k_pages, k_buffer), (v_pages, v_buffer)):
                    act(
                        pltpu.make_async_copy(
                            pages.at[page], buffer.at[slot, i], copies_done.at[slot]
                        )
                    )

    @pl.when(b == 0)
    def _():
        # Entries that were never copied are masked, but still multiplied.
        v_buffer[...] = jnp.zeros_like(v_buffer)
        slot_ref[0] = 0
        each_page(0, 0, 0, lambda copy: copy.start())

    max_ref[...] = jnp.full_like(max_ref, MASKED)
    denominator_ref[...] = jnp.zeros_like(denominator_ref)
    numerator_ref[...] = jnp.zeros_like(numerator_ref)
    n_groups = pl.cdiv(high[b] - low[b], n)
    last = last_ref[...]

    def one_group(group, _):
        slot = slot_ref[0]
        ends = group == n_groups - 1
        row = jnp.where(ends, b + 1, b)

        @pl.when(row < pl.num_programs(0))
        def _():
            each_page(row, jnp.where(ends, 0, group + 1), 1 - slot, lambda copy: copy.start())

        each_page(b, group, slot, lambda copy: copy.wait())
        at = (low[b] + group * n) * page_len
        key = at + lax.broadcasted_iota(jnp.int32, (last.shape[0], n * page_len), 1)
        visible = (key <= last) & (key > last - window[0])
        for h in range(K):
            k, v = (buffer[slot, :, h].reshape(n * page_len, H) for buffer in (k_buffer, v_buffer))
            _add_keys(h, q_ref[h], k, v, visible, (max_ref, denominator_ref, numerator_ref), spec)
        slot_ref[0] = 1 - slot

    lax.fori_loop(0, n_groups, one_group, None)
    out_ref[...] = jnp.where(last >= 0, numerator_ref[...] / denominator_ref[...], 0.0)


def _add_keys(h: int, q, k, v, visible, state, spec: AttentionSpec) -> None:
    """Adds keys [S, H] and values of kv head h to the online softmax in the refs `state`."""
    max_ref, denominator_ref, numerator_ref = state
    products = lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    scores = jnp.where(visible, spec.scores(products), MASKED)
    max_score = jnp.maximum(max_ref[h], jnp.max(scores, axis=1, keepdims=True))
    weights, correction = jnp.exp(scores - max_score), jnp.exp(max_ref[h] - max_score)
    new_values = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    max_ref[h] = max_score
    denominator_ref[h] = denominator_ref[h] * correction + jnp.sum(weights, axis=1, keepdims=True)
    numerator_ref[h] = numerator_ref[h] * correction + new_values
