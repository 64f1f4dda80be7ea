"""Keeps orbax's own words off the terminal: what fails is raised to us, and we say it once."""

import logging
import sys
import traceback


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/checkpoint/" not in record.pathname


class OrbaxNoise:
    """Holds back orbax's log records, and the errors of writes and reads that outlive a failed save or restore.

    When one array of a save fails, the event loop of its thread is closed while the other arrays are
    still being written; each of them then reports "Event loop is closed" through sys.unraisablehook,
    hundreds of tracebacks around the one message that matters.
    """

    def silence(self) -> None:
        logging.getLogger("absl").addFilter(_not_from_orbax)
        self._previous = sys.unraisablehook
        sys.unraisablehook = self._hook

    def restore(self) -> None:
        logging.getLogger("absl").removeFilter(_not_from_orbax)
        if sys.unraisablehook == self._hook:
            sys.unraisablehook = self._previous

    def _hook(self, what: "sys.UnraisableHookArgs") -> None:
        frames = [frame.name for frame in traceback.extract_tb(what.exc_traceback)]
        if str(what.exc_value) != "Event loop is closed" or "call_soon_threadsafe" not in frames:
            self._previous(what)
