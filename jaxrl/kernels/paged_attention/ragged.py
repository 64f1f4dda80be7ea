"""Ragged paged attention on TPU: a Pallas kernel that reads only each row's own pages.

A row of queries (one token in decode, part of a prompt in prefill) visits its pages in groups.
Copies of the following groups, also of the following rows, are under way while a group is
processed. The cores of a chip share the rows, in runs with about equally many pages. Online softmax
as in kernels/attention/online_softmax.py; scores, softmax and sums are float32, matrix products use
the pages' dtype.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.online_softmax import MASKED
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.paged_attention.limits import LANES, unsupported_by_ragged
from jaxrl.kernels.paged_attention.pages import Pages
from jaxrl.kernels.paged_attention.rows import join_rows, split_rows
from jaxrl.kernels.shard_attention import shard_paged_attention
from jaxrl.kernels.sinks import row_sinks
from sharding import target_cores

MAX_QUERIES = 512  # tokens x query heads per kv head in one row
QUERY_BYTES = 6 * 2**20  # of VMEM, for a row
# A group of pages. More keys share the fixed cost of a group; scores of all queries are in VMEM.
MAX_KEYS = 1024
MAX_SCORES = 2**18
GROUP_BYTES = 2**20  # of keys
# Groups in VMEM, of 16 MiB for a kernel: one is processed, the others are being copied. To use the
# bandwidth of HBM, a core needs it times the latency of a copy in flight. At 1 us, which is an
# assumption, that is 0.8 MB (v5e), 1.4 MB (v5p), 1.6 MB (v6e) or 3.7 MB (v7x).
MAX_GROUPS = 8
BUFFER_BYTES = 6 * 2**20  # of keys and values
SHARED_BYTES = 9 * 2**20  # of the buffers and the row; the rest is for scores


def paged_attention_ragged(
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
    spec: AttentionSpec,
    interpret: bool | pltpu.InterpretParams,
    q,
    k_pages,
    v_pages,
    table,
    positions,
    ahead,
    window,
    sinks,
):
    rows = split_rows(
        q.astype(k_pages.dtype), positions, window,
        n_kv_heads=k_pages.shape[1], page_len=k_pages.shape[2], size=lambda M: M,
        max_queries=min(MAX_QUERIES, QUERY_BYTES // _query_bytes(k_pages, sinks)), ahead=ahead,
    )  # fmt: skip
    n_rows, K, M, H = rows.q.shape
    pools = [k_pages] if v_pages is None else [k_pages, v_pages]
    n_groups, n = _buffer_sizes(k_pages, len(pools), M, table.shape[1], sinks)
    n_cores = min(target_cores(), n_rows)
    starts = _divide_rows(rows.high - rows.low + n // 2, n_cores)

    def block(*shape):
        """The part of an array that belongs to the row of a program, or to the core's last row."""

        def index(core, step, starts, *_):
            row = jnp.minimum(starts[core] + step, starts[core + 1] - 1)
            return row, *(0 for _ in shape)

        return pl.BlockSpec((None, *shape), index)

    scalars = starts, table.reshape(-1), rows.low, rows.high, rows.window[None]
    arrays, specs = [rows.last[..., None]], [block(M, 1)]
    if ahead is not None:
        arrays, specs = [*arrays, rows.own[..., None]], [*specs, block(M, 1)]
    elif n_rows == positions.size:  # one token, whose position is a scalar
        scalars, arrays, specs = (*scalars, positions.reshape(-1)), [], []
    if sinks is not None:
        by_row = jnp.asarray(row_sinks(sinks, K, M * K // q.shape[2]))[..., None]
        arrays, specs = [*arrays, by_row], [*specs, pl.BlockSpec((K, M, 1), lambda *_: (0, 0, 0))]
    pool = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            n_columns=table.shape[1],
            n_pieces=n_rows // len(table),
            with_sinks=sinks is not None,
            with_own=ahead is not None,
            n_pools=len(pools),
            spec=spec,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(n_cores, jnp.max(starts[1:] - starts[:-1]) if n_cores > 1 else n_rows),
            in_specs=[*specs, block(K, M, H), *(pool for _ in pools)],
            out_specs=block(K, M, H),
            scratch_shapes=[
                *(pltpu.VMEM((n_groups, n, *k_pages.shape[1:]), k_pages.dtype) for _ in pools),
                pltpu.SemaphoreType.DMA((n_groups,)),
                pltpu.SMEM((3,), jnp.int32),
                *(pltpu.VMEM((K, M, width), jnp.float32) for width in (1, 1, H)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((n_rows, K, M, H), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,  # they take as many instructions as the rest of a copy
        ),
        name="ragged_paged_attention",
        interpret=interpret,
    )(*scalars, *arrays, rows.q, *pools)
    return join_rows(out, q.shape)


def _query_bytes(k_pages: jax.Array, sinks: jax.Array | None) -> int:
    """VMEM for a query of all kv heads: itself and its output, both twice, and its softmax.

    Its sinks are there twice too.
    """
    _, K, _, H = k_pages.shape
    n_columns = 2 if sinks is None else 4  # of one number per query, in whole lanes
    return K * (2 * 2 * H * k_pages.dtype.itemsize + 4 * (H + n_columns * LANES))


def _buffer_sizes(
    k_pages: jax.Array, n_pools: int, M: int, n_columns: int, sinks: jax.Array | None
) -> tuple[int, int]:
    """(groups in VMEM, pages of a group) for rows of M queries."""
    _, K, page_len, H = k_pages.shape
    page_bytes = K * page_len * H * k_pages.dtype.itemsize
    n_keys = min(MAX_KEYS, MAX_SCORES // M)
    n = max(min(n_keys // page_len, GROUP_BYTES // page_bytes, n_columns), 1)
    free = min(BUFFER_BYTES, SHARED_BYTES - M * _query_bytes(k_pages, sinks))
    return max(min(free // (n_pools * n * page_bytes), MAX_GROUPS), 2), n


def _divide_rows(work: Int[Array, "R"], n: int) -> Int[Array, "n1"]:
    """The limits of n runs of rows with about equal work, each of at least one row.

    Few operations, because they run in every layer.
    """
    R = len(work)
    row, share = jnp.arange(R), jnp.arange(1, n)
    # Negative at rows up to which the work is less than total * share / n.
    excess = n * (row[:, None] >= row) - share[:, None, None]
    limits = jnp.sum(jnp.sum(work * excess, axis=2) < 0, axis=1) + 1
    limits = jnp.clip(limits, share, R - n + share)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), limits, jnp.full(1, R)])


@dataclasses.dataclass(frozen=True)
class _Copies:
    """Copies of groups of pages to the buffers, one after the other in the order of a core's rows.

    `place` has the buffer of the group that is processed, and the row and the first column of the
    next group to copy.
    """

    end: Any  # of the core's rows
    table: Any
    low: Any
    high: Any
    pools: tuple[Any, ...]  # of keys and values; one if the keys are the values
    buffers: tuple[Any, ...]
    done: Any  # semaphores
    place: Any
    n_columns: int
    n_pieces: int

    @property
    def n_groups(self) -> int:
        return self.buffers[0].shape[0]

    @property
    def n_pages(self) -> int:
        """Pages of a group."""
        return self.buffers[0].shape[1]

    def start_next(self, slot) -> None:
        """Starts the copies of the next group, if there is one, to the buffer `slot`."""
        row, first, n = self.place[1], self.place[2], self.n_pages

        @pl.when(row < self.end)
        def _():
            for i in range(n):

                @pl.when(first + i < self.high[row])
                def _(i=i):
                    page = self.table[row // self.n_pieces * self.n_columns + first + i]
                    for pool, buffer in zip(self.pools, self.buffers, strict=True):
                        pltpu.make_async_copy(
                            pool.at[page], buffer.at[slot, i], self.done.at[slot]
                        ).start()

            ends = first + n >= self.high[row]
            following = jnp.minimum(row + 1, self.low.shape[0] - 1)
            self.place[1] = jnp.where(ends, row + 1, row)
            self.place[2] = jnp.where(ends, self.low[following], first + n)

    def wait(self, slot, count) -> None:
        """Waits for the `count` pages of a group, by the powers of two whose sum it is."""
        for size in (1 << e for e in range(self.n_pages.bit_length())):

            @pl.when(count & size != 0)
            def _(size=size):
                for buffer in self.buffers:
                    pages = buffer.at[slot, :size]
                    pltpu.make_async_copy(pages, pages, self.done.at[slot]).wait()


def _kernel(
    starts, table, low, high, window, last_ref, *rest,
    n_columns, n_pieces, with_sinks, with_own, n_pools, spec: AttentionSpec,
):  # fmt: skip
    """One row of a core. The buffers and the copies persist from one row to the next."""
    sinks_ref = rest[with_own] if with_sinks else None
    q_ref, *refs = rest[with_own + with_sinks :]
    pools, (out_ref, *refs) = refs[:n_pools], refs[n_pools:]
    buffers, (done, place, max_ref, denominator_ref, numerator_ref) = refs[:n_pools], refs[n_pools:]
    core, step = pl.program_id(0), pl.program_id(1)
    b, end = starts[core] + step, starts[core + 1]
    n_groups, n, K, page_len, H = buffers[0].shape
    copies = _Copies(
        end, table, low, high, tuple(pools), tuple(buffers), done, place, n_columns, n_pieces
    )

    @pl.when(step == 0)
    def _():
        # Entries that were never copied are masked, but still multiplied.
        buffers[-1][...] = jnp.zeros_like(buffers[-1])
        place[0], place[1], place[2] = 0, b, low[b]
        lax.fori_loop(0, n_groups - 1, lambda slot, _: copies.start_next(slot), None)

    @pl.when(b < end)
    def _():
        if sinks_ref is None:
            max_ref[...] = jnp.full_like(max_ref, MASKED)
            denominator_ref[...] = jnp.zeros_like(denominator_ref)
        else:  # the state after a key with the score of the sink, whose value is zero
            max_ref[...] = sinks_ref[...]
            denominator_ref[...] = jnp.ones_like(denominator_ref)
        numerator_ref[...] = jnp.zeros_like(numerator_ref)
        last = last_ref[...] if len(last_ref.shape) > 1 else last_ref[b]
        own = rest[0][...] if with_own else last

        def one_group(group, _):
            slot, first = place[0], low[b] + group * n
            copies.start_next(jnp.where(slot == 0, n_groups, slot) - 1)
            copies.wait(slot, jnp.minimum(high[b] - first, n))
            shape = q_ref.shape[1], n * page_len
            key = first * page_len + lax.broadcasted_iota(jnp.int32, shape, 1)
            visible = (key <= last) & (key > own - window[0])
            for h in range(K):
                k, *others = (buffer[slot, :, h].reshape(-1, H) for buffer in buffers)
                v = others[0] if others else k
                state = max_ref, denominator_ref, numerator_ref
                _add_keys(h, q_ref[h], k, v, visible, state, spec)
            place[0] = jnp.where(slot == n_groups - 1, 0, slot + 1)

        lax.fori_loop(0, pl.cdiv(high[b] - low[b], n), one_group, None)
        out = jnp.where(last >= 0, numerator_ref[...] / denominator_ref[...], 0.0)
        out_ref[...] = out.astype(out_ref.dtype)


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
