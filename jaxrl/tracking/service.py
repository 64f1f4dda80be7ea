"""A tracker that may be unreachable: its metrics are kept until it answers."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrl.tracking.json_lines import JsonLines
from jaxrl.tracking.logger import Logger, warn
from jaxrl.tracking.packages import MissingPackage

MIN_PAUSE_S, MAX_PAUSE_S = 30.0, 1800.0  # after a failure, until the next call
PAUSE_PER_FAILURE = 20  # pause / seconds of the failed call: failures cost at most 5 % of a run


class TrackingService:
    """A logger that starts when its service can be reached.

    While it cannot, metrics are kept in memory and sent later; samples are skipped. Metrics that
    were never sent are written to unsent_<name>.jsonl when the run ends. The first failure is
    printed. After a failure the service is not called for a while, so that its timeouts do not slow
    down the run.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Logger],
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the logger. Raises MissingPackage; other errors are printed."""
        self.name, self.unsent_path = name, folder / f"unsent_{name}.jsonl"
        self._start, self._clock = start, clock
        self._logger: Logger | None = None
        self._pending: list[tuple[int, dict[str, float]]] = []
        self._retry_at, self._pause, self._warned = -1.0, 0.0, False
        self._call(lambda logger: None)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._pending.append((step, values))
        self._call(self._send)

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        self._call(lambda logger: logger.samples(step, records))

    def text(self, text: str) -> None:
        self._call(lambda logger: logger.text(text))

    def close(self) -> None:
        """Tries once more to send what is pending, and writes the rest to a file."""
        if self._pending:
            self._retry_at = -1.0
            self._call(self._send)
        if self._pending:
            unsent = JsonLines(self.unsent_path, resume_step=None)
            unsent.write(*({"step": step, **values} for step, values in self._pending))
            unsent.close()
            warn(
                f"the logger {self.name!r} did not answer again; its missing metrics are in "
                f"{self.unsent_path}"
            )
        if self._logger is not None:
            self._call(lambda logger: logger.close())

    def _send(self, logger: Logger) -> None:
        """Sends what is pending. Metrics that are rejected while later ones are taken are lost."""
        while self._pending:
            try:
                logger.metrics(*self._pending[0])
            except Exception:
                if len(self._pending) == 1:
                    raise
                logger.metrics(*self._pending[-1])
                self._pending.pop()
            del self._pending[0]

    def _call(self, call: Callable[[Logger], None]) -> None:
        before = self._clock()
        if before < self._retry_at:
            return
        try:
            if self._logger is None:
                with kept_signal_handlers():
                    self._logger = self._start()
            call(self._logger)
            self._pause = 0.0
        except MissingPackage:
            raise
        except Exception as error:  # of a foreign service
            self._fail(error, self._clock() - before)

    def _fail(self, error: Exception, seconds: float) -> None:
        pause = max(2 * self._pause, MIN_PAUSE_S, PAUSE_PER_FAILURE * seconds)
        self._pause = min(pause, MAX_PAUSE_S)
        self._retry_at = self._clock() + self._pause
        if not self._warned:
            self._warned = True
            what = "does not start" if self._logger is None else "fails"
            warn(
                f"the logger {self.name!r} {what}; the run continues, and sends its metrics when "
                "the service answers",
                error,
            )


@contextlib.contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restores the signal handlers, which some trackers replace when they start.

    The run's own handlers save its state.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
