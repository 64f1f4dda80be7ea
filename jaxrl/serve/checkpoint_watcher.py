"""Follows a run: the newest checkpoint takes the place of the weights that are served."""

import functools
import logging
import threading

from jaxrl.io.checkpoint.errors import CheckpointError, OrbaxLogFilter
from jaxrl.serve.checkpoints import Checkpoints
from jaxrl.serve.engine_thread import EngineThread
from jaxrl.serve.metrics import Meters

log = logging.getLogger(__name__)
LOOK_S = 2.0  # between two looks at the folder of checkpoints


class Follower:
    """A thread that reads checkpoints into host memory, one at a time, and hands them to the engine's.

    One that cannot be read or is of another model is told and left out.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        engine: EngineThread,
        meters: Meters,
        *,
        look_s: float = LOOK_S,
    ):
        self._checkpoints, self._engine, self._meters = checkpoints, engine, meters
        self._look_s = look_s
        self._last = engine.step  # that was looked at
        self._log_filter = OrbaxLogFilter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        self._log_filter.install()
        self._thread.start()

    def stop(self) -> None:
        """A checkpoint that is being read is read to its end, for nobody."""
        self._stopped.set()
        self._log_filter.remove()

    def _run(self) -> None:
        while not self._stopped.wait(self._look_s):
            if not self._engine.updating:
                try:
                    self._look()
                except (CheckpointError, OSError) as problem:
                    self._meters.weights_failures.inc()
                    log.warning("%s; step %s is served on", problem, self._engine.step)

    def _look(self) -> None:
        newest = self._checkpoints.newest()
        if newest in (None, self._last):
            return
        self._last = newest
        weights = self._checkpoints.read(newest)
        self._engine.update(functools.partial(self._checkpoints.place, weights), newest)
