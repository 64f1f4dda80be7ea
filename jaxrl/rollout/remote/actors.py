"""Rollout workers as Ray actors: how they are started, called and ended."""

import dataclasses
import pickle
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from jaxrl.rollout.remote.work import Done, Location, Registration, Settings, Work
from jaxrl.rollout.remote.worker import RolloutWorker
from jaxrl.runtime.ray_cluster import actor_options, forwarded_environment
from jaxrl.runtime.versions import versions


class WorkerLost(Exception):
    """A worker's process, or its host, has ended."""


@runtime_checkable
class Actors(Protocol):
    """Workers in other processes. Calls return at once."""

    def start(self) -> Any:
        """Starts a worker, once a host is free. Returns its handle."""
        ...

    def locate(self, worker: Any) -> Any:
        """A call whose result is its Location, as soon as its process runs."""
        ...

    def register(self, worker: Any) -> Any:
        """A call whose result is its Registration."""
        ...

    def dispatch(self, worker: Any, work: Work) -> Any:
        """A call whose result is its Done."""
        ...

    def finished(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """The calls that have ended, after waiting for the first at most `timeout_s`."""
        ...

    def result(self, call: Any) -> Location | Registration | Done:
        """Raises WorkerLost, or the worker's error."""
        ...

    def kill(self, worker: Any) -> None: ...


@dataclasses.dataclass
class RayActors:
    """Implements Actors with Ray."""

    ray: ModuleType
    settings: Settings
    reserved: dict[str, int]  # resources of each worker
    environment: dict[str, str]  # variables of the workers, in addition to those of this process

    def __post_init__(self) -> None:
        environment = forwarded_environment() | self.environment
        self._pickled, self._versions = pickle.dumps(self.settings), versions()
        self._actor = self.ray.remote(RolloutWorker).options(
            **actor_options(self.reserved),
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment},
        )

    def start(self) -> Any:
        return self._actor.remote(self.ray.get)

    def locate(self, worker: Any) -> Any:
        return worker.locate.remote()

    def register(self, worker: Any) -> Any:
        return worker.register.remote(self._versions, self._pickled)

    def dispatch(self, worker: Any, work: Work) -> Any:
        return worker.dispatch.remote(work)

    def finished(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        self.ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        return self.ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]

    def result(self, call: Any) -> Location | Registration | Done:
        errors = self.ray.exceptions
        try:
            return self.ray.get(call)
        except errors.RayTaskError as error:
            raise error.cause from error
        except errors.RayError as error:
            raise WorkerLost(f"{type(error).__name__}, its process or host has ended") from error

    def kill(self, worker: Any) -> None:
        self.ray.kill(worker)
