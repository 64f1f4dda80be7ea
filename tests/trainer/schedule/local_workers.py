"""Rollout workers in the process of training, for whole runs without Ray.

python -m tests.trainer.schedule.local_workers --config=...     as jaxrl.train
"""

import importlib
import pickle
import sys
import types
from collections.abc import Callable

import jax

from jaxrl import train
from jaxrl.config.command_line import parse
from jaxrl.layout import worker_mesh
from jaxrl.rollout.remote.actors import WorkerLost
from jaxrl.rollout.remote.worker import RolloutWorker
from jaxrl.runtime.versions import versions
from jaxrl.trainer.loop import exit_status


class Clock:
    """In place of the module `time` of the pool: it stands still while workers compile."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class LocalActors:
    """Implements Actors: a call is a function that runs when its result is taken.

    After `n_dispatches` all workers are lost, and no host is free for others.
    """

    def __init__(self):
        self.clock, self.n_dispatches, self.n_done, self.alive = Clock(), 1 << 30, 0, []

    def open(self, ray, settings, reserved, environment):
        """In place of the class RayActors: the actors of a new run."""
        self.settings, self.n_done, self.alive = pickle.dumps(settings), 0, []
        return self

    @property
    def room(self):
        return self.n_done < self.n_dispatches

    def start(self):
        worker = RolloutWorker(list)  # a reference is its object
        self.alive += [worker] if self.room else []
        return worker

    def locate(self, worker):
        return worker, worker.locate

    def register(self, worker):
        return worker, lambda: worker.register(versions(), self.settings)

    def dispatch(self, worker, work):
        self.n_done += 1
        if not self.room:
            self.alive.clear()
        return worker, lambda: worker.dispatch(work)

    def finished(self, calls, timeout_s):
        ended = [call for call in calls if self.room or call[1] != call[0].locate]
        self.clock.sleep(0.0 if ended else timeout_s)
        return ended

    def result(self, call):
        worker, run = call
        if worker not in self.alive:
            raise WorkerLost("killed")
        return run()

    def kill(self, worker):
        pass


def use_local_workers(patch: Callable[[str, object], None]) -> LocalActors:
    """Makes runs of this process use LocalActors instead of Ray, each worker on one device.

    `patch` sets the attribute at a path.
    """
    actors, ray = LocalActors(), types.ModuleType("ray")
    ray.__dict__["put"] = lambda value: value
    patch(
        "jaxrl.trainer.setup.session.connect_to_workers",
        lambda cfg: ray if cfg.schedule.rollout_workers else None,
    )
    patch("jaxrl.trainer.setup.workers.RayActors", actors.open)
    patch("jaxrl.rollout.remote.pool.time", actors.clock)
    patch(
        "jaxrl.rollout.remote.worker.worker_mesh",
        lambda cfg, devices: worker_mesh(cfg, jax.local_devices()[-1:]),
    )
    return actors


def set_attribute(path: str, value: object) -> None:
    module, _, name = path.rpartition(".")
    setattr(importlib.import_module(module), name, value)


if __name__ == "__main__":  # without pytest, with which progress is silent
    use_local_workers(set_attribute)
    sys.exit(exit_status(train.train, parse(sys.argv[1:])))
