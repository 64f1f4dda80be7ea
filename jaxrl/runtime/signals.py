"""Ctrl-C and SIGTERM during steps: the first makes the run save and stop, the second ends it.

Before the first step, `jaxrl.ending` ends the process at the first one.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from jaxrl.ending import SIGNALS
from sharding import hosts

STOPS = "the run stops as soon as it can save; send it again to end at once without saving"


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

        All processes must call it together. From then on `check_local` raises on every process too.
        """
        signals = [name for name in hosts.gather(self.signal) if name]
        if signals:
            self.signal = self.signal or signals[0]
            raise Interrupted(signals[0])

    @contextlib.contextmanager
    def agreed(self) -> Iterator[Callable[[], None]]:
        """A block in which each process waits for its own work. Gives what to call meanwhile.

        That ends the block of a process that received a signal. Interrupted is raised on every
        process, after the blocks of all; ValueError and OSError as `hosts.raise_together` does.
        """
        with hosts.raise_together(), contextlib.suppress(Interrupted):
            yield self.check_local
        self.check()


@contextlib.contextmanager
def stop_on_signals(flag: StopFlag) -> Iterator[None]:
    """Sets the flag at the first SIGINT or SIGTERM, with a line on standard error.

    A second one has its previous effect.
    """
    old = {number: signal.getsignal(number) for number in SIGNALS}

    def on_signal(number: int, frame: FrameType | None) -> None:
        flag.signal = signal.Signals(number).name
        os.write(2, f"\n{flag.signal}: {STOPS}\n".encode())
        restore()

    def restore() -> None:
        signal.set_wakeup_fd(old_fd, warn_on_full_buffer=False)
        for number, handler in old.items():
            signal.signal(number, handler)

    old_fd = -1
    for number in SIGNALS:
        signal.signal(number, on_signal)
    old_fd = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        restore()
