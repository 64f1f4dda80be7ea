"""Rows of prefill: how chunks of sequences are divided into rows, and rows into calls.

Every layer writes the KV of all rows of a call before any row attends, so tokens of one sequence
may be in several rows. Images whose tokens see each other are in the rows of one call.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from jaxrl.engine.prefill import PrefillChunk


def split_rows(chunks: list[PrefillChunk], row_len: int) -> list[PrefillChunk]:
    """Splits the chunks into rows of up to `row_len` tokens.

    An image whose tokens see each other begins a row.
    """
    return [
        dataclasses.replace(
            chunk,
            tokens=chunk.tokens[i:end],
            start=chunk.start + i,
            axes=None if chunk.axes is None else chunk.axes[i:end],
            ahead=None if chunk.ahead is None else chunk.ahead[i:end],
            source=chunk.target if i else chunk.source,
        )
        for chunk in chunks
        for i, end in _row_limits(chunk, row_len)
    ]


def _row_limits(chunk: PrefillChunk, row_len: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of each row of a chunk."""
    n = len(chunk.tokens)
    images = np.zeros(0, np.int64) if chunk.ahead is None else _image_starts(chunk)
    for begin, end in itertools.pairwise(sorted({0, n, *images.tolist()})):
        for i in range(begin, end, row_len):
            yield i, min(i + row_len, end)


def _image_starts(chunk: PrefillChunk) -> np.ndarray:
    """The places in the chunk at which an image begins."""
    image = np.diff(chunk.tokens < 0, prepend=False).astype(bool)
    return np.flatnonzero(image & (chunk.tokens < 0))


def prefill_calls(
    rows: list[list[PrefillChunk]], buckets: list[int]
) -> Iterator[tuple[list[list[PrefillChunk]], int]]:
    """(rows of each replica, bucket) of each call, with the programs of these buckets, ascending.

    The rows of an image whose tokens see each other are in one call.
    """
    while longest := max(map(len, rows)):
        fits = [b for b in buckets if b <= longest][-1:] or buckets[:1]
        bucket = max(*fits, *(_least_rows(own) for own in rows))
        bucket = min(b for b in buckets if b >= bucket)
        counts = [_rows_of_call(own, bucket) for own in rows]
        yield [own[:n] for own, n in zip(rows, counts, strict=True)], bucket
        rows = [own[n:] for own, n in zip(rows, counts, strict=True)]


def _rows_of_call(rows: list[PrefillChunk], most: int) -> int:
    """How many of the first rows a call of up to `most` has."""
    return max(n for n in range(min(most, len(rows)) + 1) if not _divides_image(rows, n))


def _least_rows(rows: list[PrefillChunk]) -> int:
    """The fewest rows that a call can have; 0 if there are none."""
    return next((n for n in range(1, len(rows) + 1) if not _divides_image(rows, n)), 0)


def _divides_image(rows: list[PrefillChunk], n: int) -> bool:
    """Whether a token of the first n rows sees one after them."""
    if not 0 < n < len(rows) or (ahead := rows[n - 1].ahead) is None:
        return False
    return int(ahead[-1]) >= rows[n - 1].start + len(ahead)
