"""metrics.jsonl and samples.jsonl: the record of a run, from which all else can be derived."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any


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
    out = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            out.append(value)
    return out


class JsonLines:
    """A file with one object per line, on disk when `write` returns.

    A line that cannot be written (full disk) is kept and written before the next one. Its partial
    output is truncated, so the file always ends with a complete line.
    """

    def __init__(self, path: Path, *, resume_step: int | None):
        """Keeps the lines up to `resume_step`; None starts an empty file."""
        self.path = path
        kept = [] if resume_step is None else read_lines(path)
        lines = [
            one for one in kept if resume_step is not None and one.get("step", 0) <= resume_step
        ]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(self._line(one) for one in lines))
        os.replace(temporary, path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        self._good = self._file.tell()
        self._pending = b""

    def write(self, *records: dict[str, Any]) -> None:
        self._pending += "".join(map(self._line, records)).encode()
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
    def _line(record: dict[str, Any]) -> str:
        return json.dumps(json_safe(record), ensure_ascii=False, allow_nan=False) + "\n"


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
        self._metrics.close()
        self._samples.close()
