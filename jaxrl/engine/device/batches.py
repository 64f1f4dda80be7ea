"""The declared shapes of dispatches, and the host-side arrays that fill them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.config.keys import RolloutConfig
from jaxrl.data.support import n_words
from jaxrl.engine.api import LogitAdjustments, Request
from jaxrl.engine.device.adjustments import MAX_BIAS, Adjustments
from jaxrl.engine.device.decode_loop import DecodeBatch
from jaxrl.engine.device.kv_pool import window_page_counts
from jaxrl.engine.device.programs import PrefillBatch
from jaxrl.engine.device.sampling import SamplingParams
from jaxrl.engine.prefill import PrefillChunk
from jaxrl.engine.scheduler import Sequence as RunningSequence
from jaxrl.models.config import DecoderConfig
from jaxrl.models.paged import PrefillSlots

MAX_STOP_IDS = 16  # stop token ids per request
PREFILL_LEN = 64  # tokens of a prefill row; longer pages make longer rows
UINT32 = 0xFFFFFFFF  # the bits of a number that a random key uses
NO_ADJUSTMENTS = LogitAdjustments()


@dataclasses.dataclass(frozen=True)
class DispatchShapes:
    """The shapes that programs are compiled for; no dispatch has any other."""

    prefill_row_len: int  # tokens, a multiple of page_len
    max_pages_per_seq: int  # columns of a page table
    windows: tuple[int, ...]  # of the page tables; 0 is that of layers that keep all tokens
    history_len: int  # tokens of a decode row's history
    keep_history: bool  # of every batch, for speculation; else only of those with adjustments
    n_vocab: int
    decode_buckets: tuple[int, ...]  # sequences of a decode batch, ascending
    prefill_buckets: tuple[int, ...]  # rows of a prefill dispatch, ascending
    mixed: bool  # whether prefill and a decode step may share a dispatch
    adapters: bool  # whether every row has an adapter, or none
    states: bool  # whether every sequence has a slot of state


def dispatch_shapes(rollout: RolloutConfig, max_len: int, cfg: DecoderConfig) -> DispatchShapes:
    """The shapes for `rollout`, the model and sequences of up to `max_len` tokens.

    Mixing prefill with decode needs prompts long enough to fill a dispatch (those of all slots
    together), and the prefix cache, which holds the chunks of a prompt.
    """
    page_len = rollout.page_len
    row_len = max(page_len, PREFILL_LEN // page_len * page_len)
    max_pages = -(-max_len // page_len)
    prefill = prefill_buckets(rollout.max_num_batched_tokens // row_len)
    prompt_rows = rollout.max_num_seqs * -(-(max_len - 1) // row_len)
    return DispatchShapes(
        prefill_row_len=row_len,
        max_pages_per_seq=max_pages,
        windows=(0, *window_page_counts(cfg, rollout, max_len)),
        history_len=max_pages * page_len,
        keep_history=rollout.spec_tokens > 0,
        n_vocab=cfg.V,
        decode_buckets=decode_buckets(rollout.max_num_seqs),
        prefill_buckets=prefill,
        mixed=rollout.prefix_cache and prompt_rows >= prefill[-1],
        adapters=cfg.lora is not None and cfg.lora.n_stacked > 0,
        states=bool(cfg.delta_layers),
    )


def decode_buckets(largest: int) -> tuple[int, ...]:
    """Decode batch sizes: doubling from 8 (4 if `largest` is at most 16), and 3/4 of `largest`.

    A rollout whose sequences end one by one spends most of its time at three quarters. Smaller
    batches are no faster, and a batch of one takes another path on CPU: slow, and rounded
    differently.
    """
    sizes = {max(largest, 2)} | ({largest * 3 // 4} if largest >= 32 else set())
    size = 4 if largest <= 16 else 8
    while size < largest:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def exit_size(n: int, buckets: tuple[int, ...], n_waiting: int) -> int:
    """Running sequences of `n` at which a decode dispatch ends early.

    A smaller batch then suffices, or ended sequences have made room for waiting ones.
    """
    if n_waiting:
        return n - max(1, n // 32)
    return max((size for size in buckets if size < n), default=0)


def prefill_buckets(largest: int) -> tuple[int, ...]:
    """Rows of a prefill dispatch: 2, 8, 32, ...; more rows take several dispatches."""
    sizes = [2]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def pad_replicas[T](by_replica: list[list[T]], bucket: int) -> list[T | None]:
    """The rows of a dispatch: `bucket` rows per replica, padded with None."""
    return [rows[i] if i < len(rows) else None for rows in by_replica for i in range(bucket)]


def split_rows(chunks: list[PrefillChunk], row_len: int) -> list[PrefillChunk]:
    """Splits the chunks into rows of `row_len` tokens."""
    return [
        dataclasses.replace(
            chunk,
            tokens=chunk.tokens[i : i + row_len],
            start=chunk.start + i,
            source=chunk.target if i else chunk.source,
        )
        for chunk in chunks
        for i in range(0, len(chunk.tokens), row_len)
    ]


def prefill_batch(rows: list[PrefillChunk | None], shapes: DispatchShapes) -> PrefillBatch:
    """The arrays of prefill rows, None being padding."""
    tokens = np.zeros((len(rows), shapes.prefill_row_len), np.int32)
    positions = np.full((len(rows), shapes.prefill_row_len), -1, np.int32)
    for b, row in enumerate(rows):
        if row is not None:
            tokens[b, : len(row.tokens)] = row.tokens
            positions[b, : len(row.tokens)] = row.start + np.arange(len(row.tokens))
    ids = [0 if row is None else row.adapter for row in rows]
    adapters = np.array(ids, np.int32) if shapes.adapters else None
    tables = _page_tables(rows, shapes)
    return PrefillBatch(tokens, positions, tables, adapters, _prefill_slots(rows, shapes))


def _prefill_slots(rows: list[PrefillChunk | None], shapes: DispatchShapes) -> PrefillSlots | None:
    if not shapes.states:
        return None
    columns = [(0, 0) if row is None else (row.source, row.target) for row in rows]
    return PrefillSlots(*np.array(columns, np.int32).reshape(-1, 2).T)


def decode_batch(
    rows: list[RunningSequence | None],
    shapes: DispatchShapes,
    eos_ids: tuple[int, ...],
    *,
    adjusted: bool,
    filters: tuple[str, ...],
) -> DecodeBatch:
    """The arrays of the next decode step of each sequence, None being padding.

    They have adjustments if `adjusted`, and of the sampling filters those in `filters`.
    """
    column = functools.partial(_column, rows)
    stops = np.full((len(rows), MAX_STOP_IDS), -1, np.int32)
    for b, row in enumerate(rows):
        if row is not None and not row.request.ignore_stop:
            ids = stop_ids(row.request, eos_ids)
            stops[b, : len(ids)] = ids
    return DecodeBatch(
        token=column(np.int32, 0, lambda seq: seq.last_token),
        position=column(np.int32, -1, lambda seq: seq.n_tokens - 1),
        remaining=column(np.int32, 0, lambda seq: seq.remaining_in_dispatch),
        seed=column(np.uint32, 0, lambda seq: seq.request.seed & UINT32),
        prompt_id=column(np.uint32, 0, lambda seq: seq.request.prompt_id & UINT32),
        sample=column(np.uint32, 0, lambda seq: seq.request.sample),
        stop_ids=stops,
        page_tables=_page_tables(rows, shapes),
        sampling=_sampling_params(rows, filters),
        history=_history(rows, shapes.history_len) if shapes.keep_history or adjusted else None,
        adjustments=_adjustments(rows, shapes.n_vocab) if adjusted else None,
        adapter=column(np.int32, 0, lambda seq: seq.request.adapter) if shapes.adapters else None,
        slots=column(np.int32, 0, lambda seq: seq.state) if shapes.states else None,
    )


def _sampling_params(
    rows: list[RunningSequence | None], filters: tuple[str, ...]
) -> SamplingParams:
    """The SamplingConfig of each row, without filters that are not in `filters`."""
    column = functools.partial(_column, rows)
    all_filters = {
        "top_k": column(np.int32, 0, lambda seq: seq.request.sampling.top_k),
        "top_p": column(np.float32, 1, lambda seq: seq.request.sampling.top_p),
        "min_p": column(np.float32, 0, lambda seq: seq.request.sampling.min_p),
    }
    return SamplingParams(
        column(np.float32, 0, lambda seq: seq.request.sampling.temperature),
        **{name: all_filters[name] for name in filters},
    )


def _adjustments(rows: list[RunningSequence | None], n_vocab: int) -> Adjustments:
    """The adjustments of each row; those of padding and of requests without any have no effect."""
    column = functools.partial(_column, rows)
    bias_ids = np.full((len(rows), MAX_BIAS), n_vocab, np.int32)
    bias = np.zeros((len(rows), MAX_BIAS), np.float32)
    allowed = np.full((len(rows), n_words(n_vocab)), UINT32, np.uint32)
    for b, row in enumerate(rows):
        if row is None:
            continue
        for k, (token, value) in enumerate(_own(row).bias):
            bias_ids[b, k], bias[b, k] = token, value
        if row.allowed is not None:
            allowed[b] = row.allowed
    return Adjustments(
        repetition_penalty=column(np.float32, 1, lambda seq: _own(seq).repetition_penalty),
        frequency_penalty=column(np.float32, 0, lambda seq: _own(seq).frequency_penalty),
        presence_penalty=column(np.float32, 0, lambda seq: _own(seq).presence_penalty),
        bias_ids=bias_ids,
        bias=bias,
        min_tokens=column(np.int32, 0, lambda seq: _own(seq).min_tokens),
        prompt_len=column(np.int32, 0, lambda seq: len(seq.request.tokens)),
        allowed=allowed,
        top_logprobs=column(np.bool_, 0, lambda seq: seq.request.top_logprobs),
    )


def _own(seq: RunningSequence) -> LogitAdjustments:
    return seq.request.adjustments or NO_ADJUSTMENTS


def _column(
    rows: list[RunningSequence | None],
    dtype: type,
    pad: int,
    value: Callable[[RunningSequence], int | float],
) -> np.ndarray:
    return np.array([pad if row is None else value(row) for row in rows], dtype)


def stop_ids(request: Request, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """All token ids that end the request."""
    return eos_ids + request.sampling.stop_token_ids


def _history(rows: list[RunningSequence | None], length: int) -> np.ndarray:
    tokens = np.zeros((len(rows), length), np.int32)
    for b, row in enumerate(rows):
        if row is not None:
            tokens[b, : row.n_tokens] = row.tokens
    return tokens


def _page_tables(
    rows: Sequence[PrefillChunk | RunningSequence | None], shapes: DispatchShapes
) -> dict[int, np.ndarray]:
    shape = len(rows), shapes.max_pages_per_seq
    tables = {window: np.zeros(shape, np.int32) for window in shapes.windows}
    for b, row in enumerate(rows):
        for window, pages in row.tables.items() if row is not None else ():
            tables[window][b, : len(pages)] = pages
    return tables
