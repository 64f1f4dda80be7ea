"""Columns and message fields of a dataset that no reader uses: named once at the start of a run."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl.data.chat.dialects import unread_fields
from jaxrl.data.sources.rows import SourceRow

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


def _sentences(row: Mapping[str, Any], reading: Reading) -> list[str]:
    """The line of the log about a row."""
    found = [reading.note] if reading.note else []
    fate = "reaches only the reward functions" if reading.passes_rest else "is not read"
    for name, value in row.items():
        if value is None:
            continue
        if name in reading.columns:
            fields = unread_fields(value, learns=reading.learns)
            found += [f"{field} in the messages of {name} is not read" for field in sorted(fields)]
        elif name not in _NEUTRAL:
            found.append(f"{name} {fate}")
    return found
