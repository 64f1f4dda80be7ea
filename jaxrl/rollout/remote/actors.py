"""Rollout workers as Ray actors: how they are started, called and ended."""

import dataclasses
import importlib
import pickle
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from jaxrl.config.keys import DistributedConfig
from jaxrl.rollout.remote.work import Location, Registration, Work, WorkDone, WorkerSettings
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

    def result(self, call: Any) -> Location | Registration | WorkDone:
        """Raises WorkerLost, or the worker's error."""
        ...

    def kill(self, worker: Any) -> None: ...


@dataclasses.dataclass(eq=False)
class ActorGroup:
    """The processes of one worker that spans hosts, by rank."""

    processes: tuple[Any, ...]  # their handles
    release: Callable[[], None]  # gives their hosts back
    coordinator: str = ""  # host:port at which the first one listens for the others


@runtime_checkable
class GroupActors(Actors, Protocol):
    """Actors whose workers may also be the processes of larger ones."""

    def start_group(self, n_hosts: int) -> ActorGroup:
        """Starts so many processes, once all of them have room: on as many hosts, if there are."""
        ...

    def register(self, worker: Any, distributed: DistributedConfig | None = None) -> Any:
        """With `distributed`, the process first joins the others of its worker."""
        ...


@dataclasses.dataclass
class RayActors:
    """Implements GroupActors with Ray."""

    ray: ModuleType
    settings: WorkerSettings
    reserved: dict[str, int]  # resources of each process
    environment: dict[str, str]  # variables of the workers, in addition to this process's

    def __post_init__(self) -> None:
        environment = forwarded_environment() | self.environment
        environment.pop("JAX_COORDINATOR_BIND_ADDRESS", None)  # of the training processes
        self._pickled, self._versions = pickle.dumps(self.settings), versions()
        self._actor = self.ray.remote(RolloutWorker)
        self._options = actor_options(self.reserved) | {"runtime_env": {"env_vars": environment}}

    def start(self) -> Any:
        return self._start("SPREAD")

    def start_group(self, n_hosts: int) -> ActorGroup:
        group = importlib.import_module("ray.util.placement_group")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        placement = group.placement_group([self.reserved] * n_hosts, strategy="SPREAD")
        processes = tuple(
            self._start(strategies.PlacementGroupSchedulingStrategy(placement, rank))
            for rank in range(n_hosts)
        )
        return ActorGroup(processes, lambda: group.remove_placement_group(placement))

    def locate(self, worker: Any) -> Any:
        return worker.locate.remote()

    def register(self, worker: Any, distributed: DistributedConfig | None = None) -> Any:
        return worker.register.remote(self._versions, self._pickled, distributed)

    def dispatch(self, worker: Any, work: Work) -> Any:
        return worker.dispatch.remote(work)

    def finished(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        self.ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        return self.ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]

    def result(self, call: Any) -> Location | Registration | WorkDone:
        errors = self.ray.exceptions
        try:
            return self.ray.get(call)
        except errors.RayTaskError as error:
            raise error.cause from error
        except errors.RayError as error:
            raise WorkerLost(f"{type(error).__name__}, its process or host has ended") from error

    def kill(self, worker: Any) -> None:
        self.ray.kill(worker)

    def _start(self, scheduling_strategy: Any) -> Any:
        make = self._actor.options(**self._options, scheduling_strategy=scheduling_strategy)
        return make.remote(self.ray.get, importlib.import_module("ray.util").get_node_ip_address)
