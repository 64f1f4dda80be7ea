"""Checkpoint errors: one message per failure, without orbax's own log lines and tracebacks."""

import logging
import sys
import traceback

from sharding import hosts


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message has the remedy."""


class DamageError(ValueError):
    """A file of a checkpoint is missing or does not have the bytes that were saved."""


def one_line(error: BaseException) -> str:
    """Type and message of an error in one line; a long message loses its middle.

    Without the type if the message is one of ours.
    """
    line = " ".join(str(error).split())
    short = line if len(line) <= 300 else f"{line[:120]} ... {line[-160:]}"
    is_ours = isinstance(error, DamageError | hosts.AgreedError)
    return short if is_ours else f"{type(error).__name__}: {short}"


class OrbaxLogFilter:
    """Hides orbax's log records and the errors of I/O that outlives a failed save or restore.

    Every failure reaches the caller as an exception, so the log lines only repeat it. When one
    array of a save fails, the event loop of its thread is closed while the other arrays are still
    being written. Each of them then reports "Event loop is closed" through sys.unraisablehook:
    hundreds of tracebacks around the one message that matters. Arrays whose write failed too are
    reported by asyncio when their tasks are collected, which may be after `remove`.
    """

    def install(self) -> None:
        logging.getLogger("absl").addFilter(_not_from_orbax)
        logging.getLogger("asyncio").addFilter(_not_of_orbax_tasks)
        self._previous = sys.unraisablehook
        sys.unraisablehook = self._hook

    def remove(self) -> None:
        logging.getLogger("absl").removeFilter(_not_from_orbax)
        if sys.unraisablehook == self._hook:
            sys.unraisablehook = self._previous

    def _hook(self, error: "sys.UnraisableHookArgs") -> None:
        frames = [frame.name for frame in traceback.extract_tb(error.exc_traceback)]
        if str(error.exc_value) != "Event loop is closed" or "call_soon_threadsafe" not in frames:
            self._previous(error)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/checkpoint/" not in record.pathname


def _not_of_orbax_tasks(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio is about something else; it names the file of a coroutine."""
    return "/orbax/checkpoint/" not in record.getMessage()
