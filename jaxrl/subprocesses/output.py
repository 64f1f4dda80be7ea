"""Output of worker processes: sanitized, limited, and shown with the name of the worker."""

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

MAX_LINE_BYTES = 2000
BURST_LINES = 200  # shown at once ...
LINES_PER_S = 20.0  # ... and in the long run
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -~])")


class OutputLog:
    """Shows the standard output and error of the workers of one pool, line by line.

    A thread per worker reads them all the time, so that no worker blocks on its output. Lines over
    the limits are counted and left out. `write` is called with one line at a time.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._write, self._clock = write, clock
        self._lock = threading.Lock()
        self._allowance, self._refilled = float(BURST_LINES), clock()
        self._n_omitted = 0

    def follow(self, pipe: IO[bytes], name: str) -> threading.Thread:
        """Shows the lines of `pipe` as "name: line" until all writers have closed it."""
        thread = threading.Thread(target=self._read, args=(pipe, name), daemon=True, name=name)
        thread.start()
        return thread

    def _read(self, pipe: IO[bytes], name: str) -> None:
        with pipe:
            while line := pipe.readline(MAX_LINE_BYTES):
                if text := plain(line.decode(errors="replace")):
                    self._show(f"{name}: {text}")

    def _show(self, line: str) -> None:
        with self._lock:
            now = self._clock()
            refill = (now - self._refilled) * LINES_PER_S
            self._allowance, self._refilled = min(BURST_LINES, self._allowance + refill), now
            if self._allowance < 1:
                self._n_omitted += 1
                return
            self._allowance -= 1
            if self._n_omitted:
                line = f"({self._n_omitted} lines of workers left out)\n{line}"
                self._n_omitted = 0
            with contextlib.suppress(OSError, ValueError):  # the trainer's output is closed
                self._write(line)


def print_line(line: str) -> None:
    """Prints a line in one piece, above the progress bars if there are any."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def plain(line: str) -> str:
    """The text of a line: no escape sequences, no control characters, no overwritten parts."""
    text = _ESCAPE_SEQUENCE.sub("", line).rstrip().rpartition("\r")[2]
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
