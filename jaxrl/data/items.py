"""Items of a dataset: prompts, demonstrations or pairs, made from the rows of its sources.

Columns and message fields that no reader uses are named once, at the start of a run.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl.data.chat.dialects import unread_fields
from jaxrl.data.images.references import IMAGE_COLUMNS
from jaxrl.data.sources.rows import Dropped, SourceRow, number_rows

_CHUNK = 1024  # rows rendered together
# Names, counts and labels of rows, which change nothing of what is learned
_NEUTRAL = {
    *("id", "_id", "idx", "index", "uid", "uuid", "unique_id", "row_id", "example_id", "hash"),
    *("problem_id", "question_id", "prompt_id", "conversation_id", "__index_level_0__"),
    *("source", "dataset", "dataset_name", "data_source", "split", "url", "license", "author"),
    *("level", "type", "problem_type", "question_type", "subject", "category", "difficulty"),
    *("topic", "domain", "task", "ability", "tags", "language", "lang", "model"),
    *("timestamp", "created", "created_at", "n_tokens", "num_turns"),
}

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The columns of one row that a reader takes."""

    columns: Sequence[str]  # that are read
    passes_rest: bool = False  # the other columns reach the reward functions
    learns: bool = False  # fields of messages say which turns are learned
    note: str = ""  # what was done to the row, for the log


@dataclasses.dataclass
class Usage:
    """Collects what is read of rows, and logs what is not, each name once."""

    reading: Callable[[Mapping[str, Any]], Reading] | None = None  # None: all columns are read
    _read: dict[str, None] = dataclasses.field(default_factory=dict)
    _found: dict[str, str] = dataclasses.field(default_factory=dict)  # sentence -> first place
    _logged: set[str] = dataclasses.field(default_factory=set)

    def add(self, rows: Iterable[SourceRow]) -> None:
        """Notes the columns and message fields of the rows."""
        if self.reading is None:
            return
        for row in rows:
            reading = self.reading(row.columns)
            names = (name for name in reading.columns if row.columns.get(name) is not None)
            self._read |= dict.fromkeys(names)
            for sentence in _sentences(row.columns, reading):
                self._found.setdefault(sentence, row.place)

    def log(self, kind: str) -> None:
        """Logs what was found since the last call and not logged before, in one line."""
        new = {s: place for s, place in self._found.items() if s not in self._logged}
        self._logged |= new.keys()
        if new:
            logger.warning(
                "%s are made of the columns %s. Else: %s. Map a column that should be read with "
                "data.columns",
                *(kind, ", ".join(self._read)),
                "; ".join(f"{sentence} (first in {place})" for sentence, place in new.items()),
            )


@dataclasses.dataclass(frozen=True)
class ItemMaker[T]:
    """Makes the items of rows, and drops those that are too long."""

    kind: str  # "prompts", for messages
    max_len: str  # the limit of the length with its keys, for messages
    columns: tuple[str, ...]  # data.columns
    make: Callable[[Sequence[SourceRow], Dropped], list[T]]  # adds what it drops
    usage: Usage = dataclasses.field(default_factory=Usage)  # of the columns of all rows


def load_items[T](sources: Sequence[str], maker: ItemMaker[T], *, max_rows: int = 0) -> list[T]:
    """All items of the sources in order.

    With `max_rows` the items of that many rows at most, evenly spaced over all rows. Raises
    ValueError if no item remains, and the errors of the sources and of the maker.
    """
    rows = number_rows(sources, maker.columns)
    if max_rows:
        rows = iter(evenly_spaced(list(rows), max_rows))
    return _make_items(rows, maker, sources)


def load_sources[T](sources: Sequence[str], maker: ItemMaker[T]) -> list[list[T]]:
    """The items of each source; otherwise as load_items."""
    found: dict[int, list[T]] = {}
    rows = number_rows(sources, maker.columns)
    for i, group in itertools.groupby(rows, key=lambda row: row.source):
        found[i] = _make_items(group, maker, sources[i : i + 1])
    if empty := [source for i, source in enumerate(sources) if i not in found]:
        raise ValueError(no_items(empty, maker, Dropped()))
    return list(found.values())


def _make_items[T](
    rows: Iterable[SourceRow], maker: ItemMaker[T], sources: Sequence[str]
) -> list[T]:
    items: list[T] = []
    dropped = Dropped()
    for chunk in itertools.batched(rows, _CHUNK):
        items += maker.make(chunk, dropped)
        maker.usage.add(chunk)
    maker.usage.log(maker.kind)
    n = len(dropped) + len(items)
    if dropped.lengths and items:
        logger.warning(
            "%d of %d %s are longer than %s tokens and were dropped",
            *(len(dropped.lengths), n, maker.kind, maker.max_len),
        )
    if dropped.errors and items:
        logger.warning(
            "%d of %d %s have images that cannot be used and were dropped; the first: %s",
            *(len(dropped.errors), n, maker.kind, dropped.errors[0]),
        )
    if not items:
        raise ValueError(no_items(sources, maker, dropped))
    return items


def no_items(sources: Sequence[str], maker: ItemMaker, dropped: Dropped) -> str:
    """The error message for sources without items."""
    names = ", ".join(sources) or "an empty list of sources"
    if not dropped:
        return f"no {maker.kind} in {names}; set data.train (or data.val) to files that have some"
    if dropped.errors:
        return (
            f"no {maker.kind} of {names} can be used: {len(dropped.errors)} have wrong images (the "
            f"first: {dropped.errors[0]}) and {len(dropped.lengths)} are longer than "
            f"{maker.max_len} tokens; correct them"
        )
    return (
        f"all {len(dropped)} {maker.kind} of {names} are longer than {maker.max_len} tokens (the "
        f"shortest has {min(dropped.lengths)}); raise it"
    )


def evenly_spaced[T](items: Sequence[T], n: int) -> Sequence[T]:
    """At most n of the items, in order and equally far apart, from the first one on."""
    if n >= len(items):
        return items
    return [items[i * len(items) // n] for i in range(n)]


def _sentences(row: Mapping[str, Any], reading: Reading) -> list[str]:
    """The line of the log about a row."""
    found = [reading.note] if reading.note else []
    fate = "reaches only the reward functions" if reading.passes_rest else "is not read"
    for name, value in row.items():
        if value is None:
            continue
        if name in reading.columns:
            if name in IMAGE_COLUMNS:  # whose reader refuses what it does not know
                continue
            fields = unread_fields(value, learns=reading.learns)
            found += [f"{field} in the messages of {name} is not read" for field in sorted(fields)]
        elif name not in _NEUTRAL:
            found.append(f"{name} {fate}")
    return found
