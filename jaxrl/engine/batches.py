"""From plans to the arrays of a dispatch, of declared shapes, on the host."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.engine.api import Request
from jaxrl.engine.rows import DecodeRows
from jaxrl.engine.sampling import SamplingParams
from jaxrl.engine.scheduler import Fill
from jaxrl.engine.scheduler import Sequence as Running

N_STOP = 16  # stop token ids of one request
UINT32 = 0xFFFFFFFF  # what a random key takes of a number


def cut(fills: list[Fill], row_len: int) -> list[Fill]:
    """The fills in rows of `row_len` tokens."""
    return [
        Fill(fill.tokens[i : i + row_len], fill.start + i, fill.pages)
        for fill in fills
        for i in range(0, len(fill.tokens), row_len)
    ]


def fill_arrays(
    rows: list[Fill | None], row_len: int, n_columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int32 tokens and positions [R, row_len], and the page table [R, C]; position -1 is padding."""
    tokens = np.zeros((len(rows), row_len), np.int32)
    positions = np.full((len(rows), row_len), -1, np.int32)
    for b, row in enumerate(rows):
        if row is not None:
            tokens[b, : len(row.tokens)] = row.tokens
            positions[b, : len(row.tokens)] = row.start + np.arange(len(row.tokens))
    return tokens, positions, _page_table(rows, n_columns)


def decode_arrays(
    rows: list[Running | None], n_columns: int, eos_ids: tuple[int, ...], *, history_len: int
) -> DecodeRows:
    """The next step of each sequence; with all their tokens where `history_len` is above 0."""

    def column(dtype: type, pad: int, value: Callable[[Running], int | float]) -> np.ndarray:
        return np.array([pad if row is None else value(row) for row in rows], dtype)

    stops = np.full((len(rows), N_STOP), -1, np.int32)
    for b, row in enumerate(rows):
        if row is not None and not row.request.ignore_stop:
            ids = stop_ids(row.request, eos_ids)
            stops[b, : len(ids)] = ids
    return DecodeRows(
        token=column(np.int32, 0, lambda seq: seq.last_token),
        position=column(np.int32, -1, lambda seq: seq.n_tokens - 1),
        remaining=column(np.int32, 0, lambda seq: seq.remaining),
        seed=column(np.uint32, 0, lambda seq: seq.request.seed & UINT32),
        prompt_id=column(np.uint32, 0, lambda seq: seq.request.prompt_id & UINT32),
        sample=column(np.uint32, 0, lambda seq: seq.request.sample),
        stop_ids=stops,
        page_table=_page_table(rows, n_columns),
        sampling=SamplingParams(
            temperature=column(np.float32, 0, lambda seq: seq.request.sampling.temperature),
            top_k=column(np.int32, 0, lambda seq: seq.request.sampling.top_k),
            top_p=column(np.float32, 1, lambda seq: seq.request.sampling.top_p),
            min_p=column(np.float32, 0, lambda seq: seq.request.sampling.min_p),
        ),
        history=_history(rows, history_len) if history_len else None,
    )


def stop_ids(request: Request, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    return eos_ids + request.sampling.stop_token_ids


def _history(rows: list[Running | None], length: int) -> np.ndarray:
    tokens = np.zeros((len(rows), length), np.int32)
    for b, row in enumerate(rows):
        if row is not None:
            tokens[b, : row.n_tokens] = row.tokens
    return tokens


def _page_table(rows: Sequence[Fill | Running | None], n_columns: int) -> np.ndarray:
    table = np.zeros((len(rows), n_columns), np.int32)
    for b, row in enumerate(rows):
        if row is not None:
            table[b, : len(row.pages)] = row.pages
    return table
