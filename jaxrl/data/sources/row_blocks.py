"""Blocks of rows, read one at a time: row groups, record batches and ranges of lines of files."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.data.sources.columns import read_columns
from jaxrl.data.sources.files import find_files, named_errors, open_arrow, parse_line
from jaxrl.data.sources.rows import SourceRow
from jaxrl.data.sources.tasks import PREFIXES, question_rows

_LINES = 1024  # of JSONL in a block
_HASHED = 1 << 16  # bytes at the start and the end of a file

Raw = pa.Table | Sequence[bytes] | Sequence[dict[str, Any]]  # rows that are not decoded


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of one file."""

    source: int  # index of the source
    file: str
    n_rows: int
    first: int  # number of the first row over all sources
    in_file: int  # ... and within the file
    load: Callable[[], Raw]

    def rows(self) -> list["LazyRow"]:
        """The rows, as they are in the file."""
        raw = self.load()
        return [LazyRow(self, raw, i) for i in range(self.n_rows)]


@dataclasses.dataclass(frozen=True)
class LazyRow:
    """A row of a block that was read but not decoded."""

    block: RowBlock
    raw: Raw
    index: int  # within the block

    def read(self, columns: Sequence[str]) -> SourceRow:
        """The row under the names of data.columns. Raises ValueError if it cannot be decoded."""
        place = f"{self.block.file}:{self.block.in_file + self.index + 1}"
        raw: Any = self.raw
        if isinstance(raw, pa.Table):
            row = raw.slice(self.index, 1).to_pylist()[0]
        elif isinstance(row := raw[self.index], bytes):
            row = parse_line(_text(row, place), place)
        is_task = self.block.file.startswith(PREFIXES)
        if not is_task:
            row = read_columns(row, columns, place)
        return SourceRow(self.block.source, self.block.first + self.index, place, row)


def index_blocks(sources: Sequence[str], first: int = 0) -> Iterator[RowBlock]:
    """The blocks of all sources in order; `first` is the number of their first row.

    Reads the metadata of parquet and arrow files, and every JSONL file once. Raises the errors of
    find_files, and ValueError for a file that cannot be read by blocks.
    """
    for i, source in enumerate(sources):
        for file, in_file, n_rows, load in _source_blocks(source):
            yield RowBlock(i, file, n_rows, first, in_file, load)
            first += n_rows


def fingerprints(blocks: Sequence[RowBlock]) -> list[str]:
    """For each file its name with a hash of its size, start and end."""
    files = dict.fromkeys(block.file for block in blocks)
    return [f"{Path(file).name} {_fingerprint(file)}" for file in files]


_Found = tuple[str, int, int, Callable[[], Raw]]  # file, row in file, rows, load


def _source_blocks(source: str) -> Iterator[_Found]:
    if source.startswith(PREFIXES):
        rows = question_rows(source)
        yield source, 0, len(rows), lambda: rows
        return
    readers = {".parquet": _row_groups, ".arrow": _record_batches, ".jsonl": _line_ranges}
    for path in find_files(source):
        if path.suffix not in readers:
            raise ValueError(
                f"{path} cannot be streamed; convert it to JSONL or parquet, or set "
                "data.streaming=False"
            )
        in_file = 0
        for n_rows, load in readers[path.suffix](path):
            yield str(path), in_file, n_rows, load
            in_file += n_rows


def _row_groups(path: Path) -> Iterator[tuple[int, Callable[[], Raw]]]:
    with named_errors(path), pq.ParquetFile(path) as file:
        for group in range(file.metadata.num_row_groups):
            n_rows = file.metadata.row_group(group).num_rows
            yield n_rows, functools.partial(_read_row_group, path, group)


def _read_row_group(path: Path, group: int) -> pa.Table:
    with named_errors(path), pq.ParquetFile(path) as file:
        return file.read_row_group(group)


def _record_batches(path: Path) -> Iterator[tuple[int, Callable[[], Raw]]]:
    with named_errors(path), pa.memory_map(str(path)) as mapped:
        for i, batch in enumerate(open_arrow(mapped)):
            yield batch.num_rows, functools.partial(_read_record_batch, path, i)


def _read_record_batch(path: Path, i: int) -> pa.Table:
    with named_errors(path), pa.memory_map(str(path)) as mapped:
        batch = next(itertools.islice(open_arrow(mapped), i, None))
        batch.validate(full=True)
        return pa.Table.from_batches([batch])


def _line_ranges(path: Path) -> Iterator[tuple[int, Callable[[], Raw]]]:
    """Ranges of lines that are not blank."""
    with path.open("rb") as lines:
        start = end = n_rows = 0
        for line in lines:
            end += len(line)
            n_rows += bool(line.strip())
            if n_rows == _LINES:
                yield n_rows, functools.partial(_read_lines, path, start, end)
                start, n_rows = end, 0
        if n_rows:
            yield n_rows, functools.partial(_read_lines, path, start, end)


def _read_lines(path: Path, start: int, end: int) -> list[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        return [line for line in file.read(end - start).split(b"\n") if line.strip()]


def _text(line: bytes, place: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 ({error})") from error


def _fingerprint(name: str) -> str:
    if name.startswith(PREFIXES):
        return name
    with open(name, "rb") as file:
        size = file.seek(0, 2)
        parts = []
        for place in (0, max(size - _HASHED, 0)):
            file.seek(place)
            parts.append(file.read(_HASHED))
    return hashlib.sha256(b"".join([str(size).encode(), *parts])).hexdigest()[:12]
