"""Rollout workers that span hosts: a group of processes, one per host, that is one worker.

    pool --- Work ---> process 0 on host A --- Done ---> pool
                \\----> process 1 on host B                       the same tokens, not used

The processes join through jax.distributed and have one engine over the devices of their hosts,
which decodes in lock-step. All get the same work, and each loads its shards of the weights. If one
of them is lost, the worker is lost, and all of them end.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.config.keys import DistributedConfig
from jaxrl.rollout.remote.actors import ActorGroup, GroupActors, WorkerLost
from jaxrl.rollout.remote.work import Location, Registration, Work, WorkDone

# A process that dies makes the collectives of the others fail, which may be known before its loss.
ERROR_GRACE_S = 10.0


@dataclasses.dataclass(eq=False)
class GroupCall:
    """The same call to every process of a worker."""

    worker: ActorGroup
    waiting: dict[int, Any]  # call of a process that has not ended, by rank
    results: dict[int, Any] = dataclasses.field(default_factory=dict)  # by rank, as the next one
    errors: dict[int, Exception] = dataclasses.field(default_factory=dict)
    failed_at: float = 0.0  # time of the first error

    def take(self, ended: set[int], result: Callable[[Any], Any]) -> None:
        """Takes the results of the calls with these ids."""
        for rank, call in list(self.waiting.items()):
            if id(call) not in ended:
                continue
            del self.waiting[rank]
            try:
                self.results[rank] = result(call)
            except Exception as error:
                self.failed_at = self.failed_at if self.errors else time.monotonic()
                self.errors[rank] = error

    @property
    def ended(self) -> bool:
        """Whether all processes have answered, or one of them cannot work with the others."""
        if not self.waiting or self.lost or self.refused:
            return True
        return bool(self.errors) and time.monotonic() - self.failed_at > ERROR_GRACE_S

    @property
    def lost(self) -> tuple[int, WorkerLost] | None:
        """(rank, error) of the first process that is lost."""
        found = ((r, e) for r, e in sorted(self.errors.items()) if isinstance(e, WorkerLost))
        return next(found, None)

    @property
    def refused(self) -> Registration | None:
        """The first registration that refuses the run."""
        found = (self.results[rank] for rank in sorted(self.results))
        return next((r for r in found if isinstance(r, Registration) and r.refused), None)


class WorkerGroups:
    """Implements Actors with workers of `n_hosts` processes each, the ones of `actors`."""

    def __init__(
        self,
        actors: GroupActors,
        *,
        n_hosts: int,
        distributed: DistributedConfig,
        detects_hosts: bool = False,
    ):
        """`distributed` has the timeouts of the processes of one worker.

        With `detects_hosts` they find each other, as on TPU, whose runtime orders the hosts.
        """
        self._actors, self._n_hosts = actors, n_hosts
        self._distributed, self._detects_hosts = distributed, detects_hosts

    def start(self) -> ActorGroup:
        return self._actors.start_group(self._n_hosts)

    def locate(self, worker: ActorGroup) -> GroupCall:
        return self._call(worker, lambda rank, process: self._actors.locate(process))

    def register(self, worker: ActorGroup) -> GroupCall:
        def register(rank: int, process: Any) -> Any:
            return self._actors.register(process, self._joining(worker, rank))

        return self._call(worker, register)

    def dispatch(self, worker: ActorGroup, work: Work) -> GroupCall:
        return self._call(worker, lambda rank, process: self._actors.dispatch(process, work))

    def finished(self, calls: Sequence[GroupCall], timeout_s: float) -> list[GroupCall]:
        waiting = [one for call in calls for one in call.waiting.values()]
        ended = set(map(id, self._actors.finished(waiting, timeout_s) if waiting else ()))
        for call in calls:
            call.take(ended, self._actors.result)
        return [call for call in calls if call.ended]

    def result(self, call: GroupCall) -> Location | Registration | WorkDone:
        """The result of the first process. Raises WorkerLost, or the error of any process."""
        if call.lost is not None:
            rank, error = call.lost
            raise WorkerLost(f"{error}, of host {rank + 1} of its {self._n_hosts}") from error
        if call.errors:
            raise call.errors[min(call.errors)]
        first = call.refused or call.results[0]
        if isinstance(first, Location):
            call.worker.coordinator = first.address
        return first

    def kill(self, worker: ActorGroup) -> None:
        for process in worker.processes:
            self._actors.kill(process)
        worker.release()

    def _call(self, worker: ActorGroup, call: Callable[[int, Any], Any]) -> GroupCall:
        return GroupCall(worker, {r: call(r, one) for r, one in enumerate(worker.processes)})

    def _joining(self, worker: ActorGroup, rank: int) -> DistributedConfig:
        """How a process joins the others of its worker."""
        coordinator, n, i = worker.coordinator, self._n_hosts, rank
        if self._detects_hosts:
            coordinator, n, i = "", 0, -1
        return dataclasses.replace(
            self._distributed, start="on", coordinator=coordinator, num_processes=n, process_id=i
        )
