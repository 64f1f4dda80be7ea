"""Numbered rows of data sources: files, folders, and generated tasks."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.data.sources.columns import map_columns
from jaxrl.data.sources.files import read_rows
from jaxrl.data.sources.tasks import PREFIXES, make_questions


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a dataset."""

    number: int  # from 0, over the concatenated sources
    place: str  # "file:row" for error messages, counted from 1
    columns: dict[str, Any]  # under the names of data.columns


def number_rows(sources: Sequence[str], columns: Sequence[str]) -> Iterator[Row]:
    """All rows of the sources in order. `columns` is data.columns; it does not apply to tasks.

    Raises FileNotFoundError or ValueError for a source that cannot be read.
    """
    found = itertools.chain.from_iterable(_rows(source, columns) for source in sources)
    for number, (place, row) in enumerate(found):
        yield Row(number, place, row)


def _rows(source: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if source.startswith(PREFIXES):
        for number, q in enumerate(make_questions(source), start=1):
            row = {"prompt": q.text, "answer": q.answer, "data_source": q.source}
            yield f"{source}:{number}", row | {"extra_info": q.extra}
        return
    for place, row in read_rows(source):
        yield place, map_columns(row, columns, place)
