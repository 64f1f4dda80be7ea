"""Ctrl-C and SIGTERM before there is state to save: one line, and the process ends at once.

Python runs signal handlers in the main thread between two bytecode instructions, so not while XLA
compiles or a library loads. Its wakeup descriptor gets the number of a signal at once, and a
thread that waits for it ends the process. Imports nothing heavy itself.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLEANUP_S = 5.0  # then the process ends, even if a disk or a pipe does not respond
SHOW_CURSOR = "\n\x1b[?25h"  # below a progress bar, which hides the cursor

_cleanups: list[Callable[[], None]] = []


def end_on_signals() -> None:
    """Makes SIGINT and SIGTERM end this process, with exit status 130 or 143.

    Call it in the main thread, and again after a library has replaced the handlers.
    """
    for number in SIGNALS:
        signal.signal(number, _hold_still)
    signal.set_wakeup_fd(_wakeup_fd(), warn_on_full_buffer=False)


def default_on_signals() -> None:
    """Restores Python's handlers: KeyboardInterrupt for SIGINT, the kernel's end for SIGTERM."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def before_ending(cleanup: Callable[[], None]) -> Iterator[None]:
    """Calls `cleanup` if a signal ends the process during the block, from another thread."""
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        _cleanups.remove(cleanup)


def _hold_still(number: int, frame: FrameType | None) -> None:
    """Keeps the main thread from its work until the other thread has ended the process."""
    time.sleep(CLEANUP_S + 1)
    os._exit(128 + number)


@functools.cache
def _wakeup_fd() -> int:
    """Starts the thread; returns the descriptor that wakes it."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    threading.Thread(target=_end_at_signal, args=(read_fd,), name="signals", daemon=True).start()
    return write_fd


def _end_at_signal(read_fd: int) -> None:
    """Waits for a signal that no other handler takes, and ends the process."""
    while signal.getsignal(number := os.read(read_fd, 1)[0]) is not _hold_still:
        pass
    name = signal.Signals(number).name
    start = SHOW_CURSOR if sys.stderr.isatty() else ""
    line = f"{start}{name}: stopped at once; the files written before are intact\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode())  # sys.stderr may be locked by the thread that prints
    cleaner = threading.Thread(target=_clean_up, daemon=True)
    cleaner.start()
    cleaner.join(CLEANUP_S)
    os._exit(128 + number)


def _clean_up() -> None:
    for cleanup in (*reversed(_cleanups), sys.stdout.flush):
        with contextlib.suppress(Exception):  # the process ends in any case
            cleanup()
