"""metrics.jsonl and samples.jsonl: the record of a run, from which all else can be derived."""

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

from jaxrl.json_text import parse_json
from jaxrl.replaced_file import replaced_file


def json_safe(value: Any) -> Any:
    """`value` with NaN and infinities as strings that float() reads: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, dict):
        return {key: json_safe(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(one) for one in value]
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a JSON-lines file; [] without a file. Truncated lines are skipped."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        return [value for line in file if (value := parse_line(line)) is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object in one line; None for a truncated or damaged line.

    Lines end at b"\\n" alone: JSON strings may contain U+2028, U+2029 and U+0085, at which
    `str.splitlines` also splits.
    """
    try:
        value = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def drop_later_steps(path: Path, step: int) -> None:
    """Removes the records after `step`, which a resumed run repeats, and a truncated last line.

    All other bytes stay as they are, also in damaged lines.
    """

    def is_kept(line: bytes) -> bool:
        found = (parse_line(line) or {}).get("step", 0)
        return line.endswith(b"\n") and not (isinstance(found, int) and found > step)

    if not path.is_file():
        return
    with open(path, "rb+") as file:
        end = sum(len(line) for line in itertools.takewhile(is_kept, file))
        file.seek(end)
        if not any(map(is_kept, file)):  # steps ascend unless a line was damaged
            file.truncate(end)
            return
        file.seek(0)
        with replaced_file(path) as kept:
            kept.writelines(filter(is_kept, file))


class JsonLines:
    """A file with one object per line, on disk when `write` returns.

    A line that cannot be written (full disk) is kept and written before the next one. Its partial
    output is truncated, so the file always ends with a complete line.
    """

    def __init__(self, path: Path, *, resume_step: int | None):
        """Keeps the lines up to `resume_step`; None starts an empty file."""
        self.path = path
        if resume_step is not None:
            drop_later_steps(path, resume_step)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        if resume_step is None:
            self._file.truncate(0)
        self._good = self._file.tell()
        self._pending = b""

    def write(self, *records: dict[str, Any]) -> None:
        self._pending += b"".join(map(self._line, records))
        try:
            while self._pending:
                n = self._file.write(self._pending)
                self._pending = self._pending[n:]
        except OSError:
            self._pending = self._truncate_partial() + self._pending
            raise
        self._good = self._file.tell()

    def close(self) -> None:
        try:
            if self._pending:
                self.write()
        finally:
            self._file.close()

    def _truncate_partial(self) -> bytes:
        """Truncates the file to the last complete line and returns the removed bytes."""
        with open(self.path, "rb+") as file:
            file.seek(self._good)
            partial = file.read()
            file.truncate(self._good)
        return partial

    @staticmethod
    def _line(record: dict[str, Any]) -> bytes:
        line = json.dumps(json_safe(record), ensure_ascii=False, allow_nan=False) + "\n"
        return line.encode(errors="backslashreplace")  # a lone surrogate becomes JSON's \\udXXX


class JsonlLogger:
    """metrics.jsonl and samples.jsonl in the run folder."""

    def __init__(self, run_dir: Path, resume_step: int | None):
        self._metrics = JsonLines(run_dir / "metrics.jsonl", resume_step=resume_step)
        self._samples = JsonLines(run_dir / "samples.jsonl", resume_step=resume_step)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._metrics.write({"step": step, "time": time.time(), **values})

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        self._samples.write(*({"step": step, **record} for record in records))

    def text(self, text: str) -> None:
        """Ignored: free text is not part of the record."""

    def close(self) -> None:
        try:
            self._metrics.close()
        finally:
            self._samples.close()
