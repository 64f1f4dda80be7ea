"""Ctrl-C and SIGTERM: the first signal makes the run save and stop, the second stops it at once."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from sharding import hosts


class Interrupted(Exception):
    """A signal stopped the run; the state of the last finished step is intact."""


class StopFlag:
    """Flag set by a signal; the run checks it between dispatches."""

    def __init__(self) -> None:
        self.signal = ""

    def check_local(self) -> None:
        """Raises Interrupted if this process received a signal."""
        if self.signal:
            raise Interrupted(self.signal)

    def check(self) -> None:
        """Raises Interrupted on every process if any of them received a signal.

        All processes must call it together.
        """
        signals = [name for name in hosts.gather(self.signal) if name]
        if signals:
            raise Interrupted(signals[0])


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Turns the first SIGINT or SIGTERM into a flag; a second one has its previous effect."""
    flag = StopFlag()
    signals = (signal.SIGINT, signal.SIGTERM)
    old = {s: signal.getsignal(s) for s in signals}

    def restore() -> None:
        for s, handler in old.items():
            signal.signal(s, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        flag.signal = signal.Signals(number).name
        restore()

    for s in signals:
        signal.signal(s, on_signal)
    try:
        yield flag
    finally:
        restore()
