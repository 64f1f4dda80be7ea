"""Ctrl-C and SIGTERM while the server loads. Imports nothing heavy."""

import os
import signal
import socket
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_previous: dict[int, object] = {}  # the handlers of the signals before loading


def begin_interrupts() -> None:
    """Ends the process at SIGINT or SIGTERM, at once and with one line, until `end_interrupts`.

    A thread does it: Python runs its own handlers when C++ code returns, such as a compilation.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    _previous.update({number: signal.signal(number, _ignore) for number in SIGNALS})
    signal.set_wakeup_fd(writing.detach())
    threading.Thread(target=_end_at_signal, args=(reading,), name="signals", daemon=True).start()


def end_interrupts() -> None:
    """Restores the handlers; does nothing if there was no `begin_interrupts`."""
    if _previous:
        os.close(signal.set_wakeup_fd(-1))
    while _previous:
        signal.signal(*_previous.popitem())  # pyright: ignore[reportArgumentType]


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler in Python, without which no signal reaches the thread."""


def _end_at_signal(reading: socket.socket) -> None:
    while received := reading.recv(1):
        if received[0] in SIGNALS:
            name = signal.Signals(received[0]).name
            os.write(2, f"\nerror: {name} before the server was ready\n".encode())
            os._exit(128 + received[0])  # as a shell reports the signal
