"""metrics.jsonl and samples.jsonl: the record of a run that everything else can be made from again."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """`value` with what JSON has no number for as a string that float() reads: NaN, Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; [] where there is none. Lines cut off by a crash are left out."""
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
    """One object per line, on disk when `write` returns.

    A line that could not be written (full disk) is kept and written before the next one; what was
    written of it is cut off again, so that the file always ends with a whole line.
    """

    def __init__(self, path: Path, *, resume_step: int | None):
        """Goes on with the lines up to `resume_step`; None starts the file anew."""
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
            self._pending = self._torn() + self._pending
            raise
        self._good = self._file.tell()

    def close(self) -> None:
        try:
            if self._pending:
                self.write()
        finally:
            self._file.close()

    def _torn(self) -> bytes:
        """Cuts off what was written since the last good line and returns it."""
        with open(self.path, "rb+") as file:
            file.seek(self._good)
            torn = file.read()
            file.truncate(self._good)
        return torn

    @staticmethod
    def _line(record: dict[str, Any]) -> str:
        return json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"


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
        """Free text is not part of the record."""

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
