"""Numbered rows of data sources: files, folders, and generated tasks; and those left out."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.data.sources.columns import read_columns
from jaxrl.data.sources.files import read_rows
from jaxrl.data.sources.tasks import PREFIXES, question_rows


@dataclasses.dataclass(frozen=True)
class SourceRow:
    """One row of a dataset."""

    source: int  # index of the source
    number: int  # from 0, over the concatenated sources
    place: str  # "file:row" for error messages, counted from 1
    columns: dict[str, Any]  # under the names of data.columns


@dataclasses.dataclass
class Dropped:
    """Rows that a run leaves out: lengths over the limit, and errors of unusable images."""

    lengths: list[int] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lengths) + len(self.errors)


def number_rows(sources: Sequence[str], columns: Sequence[str]) -> Iterator[SourceRow]:
    """All rows of the sources in order. `columns` is data.columns; it does not apply to tasks.

    Raises FileNotFoundError or ValueError for a source that cannot be read.
    """
    numbers = itertools.count()
    for i, source in enumerate(sources):
        for place, row in _rows(source, columns):
            yield SourceRow(i, next(numbers), place, row)


def _rows(source: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if source.startswith(PREFIXES):
        for number, row in enumerate(question_rows(source), start=1):
            yield f"{source}:{number}", row
        return
    for place, row in read_rows(source):
        yield place, read_columns(row, columns, place)
