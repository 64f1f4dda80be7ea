"""TensorBoard's event files."""

import math
import time
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (  # protobuf makes these names when it is imported
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from jaxrl.config.keys import LogConfig
from jaxrl.tracking.samples import sample_markdown


def event(step: int, content: Summary) -> Event:
    return Event(step=step, summary=content)


class TensorBoardLogger:
    """Event files in run_dir/tensorboard. TensorBoard hides events after the resumed step.

    Events are written by the caller's thread: tensorboardX's writer thread dies silently when the
    disk is full, and later events would block forever.
    """

    def __init__(self, cfg: LogConfig, run_dir: Path, resume_step: int | None):
        self._folder = run_dir / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            for old in self._folder.glob("events.out.tfevents.*"):
                old.unlink()
        self._n = cfg.samples
        self._writer: EventsWriter | None = None
        if resume_step is not None:
            session = SessionLog(status=SessionLog.START)
            self._write(Event(step=resume_step + 1, session_log=session))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._write(*(event(step, summary.scalar(name, value)) for name, value in finite.items()))

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        tags = {
            f"{record.get('kind', 'train')}/sample_{i}": sample_markdown(record)
            for i, record in enumerate(records[: self._n])
        }
        self._write(*(event(step, summary.text(tag, text)) for tag, text in tags.items()))

    def text(self, text: str) -> None:
        self._write(event(0, summary.text("text", text)))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, *events: Event) -> None:
        """Starts a new file after a failure: readers stop at a truncated record."""
        if self._writer is None:
            suffix = f".{time.time_ns()}"  # file names have a resolution of one second
            self._writer = EventsWriter(str(self._folder / "events"), suffix)
        try:
            for one in events:
                one.wall_time = time.time()
                self._writer.write_event(one)
            self._writer.flush()
        except OSError:
            self._writer = None
            raise
