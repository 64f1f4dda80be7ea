"""The one thread that owns the engine and the device. Others hand it requests and get tokens back."""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
from jax.sharding import Mesh

from jaxrl.rollout.api import Generated, Request
from jaxrl.rollout.engine import PagedEngine
from jaxrl.serve.errors import Refused
from jaxrl.serve.meters import Meters
from jaxrl.types import Tree

log = logging.getLogger(__name__)

Deliver = Callable[[Generated | Refused], None]


@dataclasses.dataclass(eq=False)
class Job:
    """One response under way. `deliver` is called on the engine's thread, last with a finish or a
    refusal; after a cancel it may be called a few times more."""

    request: Request
    deliver: Deliver
    slot: int = -1  # of the engine, once it has the request


class EngineThread:
    """Runs dispatch after dispatch while there are jobs; between two of them it takes in new jobs and
    cancels old ones."""

    def __init__(
        self, engine: PagedEngine, params: Tree, mesh: Mesh, meters: Meters, *, most_jobs: int
    ):
        """At most `most_jobs` may be under way, those that wait included."""
        self._engine, self._params, self._mesh, self._meters = engine, params, mesh, meters
        self.most_jobs = most_jobs
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # by slot
        self._n_jobs, self._lock = 0, threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # For other threads

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes all jobs or none. Raises Refused (429) where there are too many under way already, and
        (503) where the thread has ended."""
        if not self.alive:
            raise Refused(503, "the server is shutting down; send the request to another one")
        with self._lock:
            if self._n_jobs + len(jobs) > self.most_jobs:
                raise Refused(
                    429,
                    f"{self._n_jobs} responses are under way, {self.most_jobs} are the most; try again later",
                    code="overloaded",
                )
            self._n_jobs += len(jobs)
        for job in jobs:
            self._orders.put(lambda job=job: self._start(job))

    def cancel(self, job: Job) -> None:
        """Ends a job and frees its pages; nothing happens where it has ended."""
        self._orders.put(lambda: self._cancel(job))

    def call[T](self, work: Callable[[Tree], T]) -> Future[T]:
        """Has the parameters worked with between two dispatches."""
        future: Future[T] = Future()

        def order() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(self._params))
            except Exception as problem:  # of the device
                future.set_exception(problem)

        self._orders.put(order)
        return future

    def stop(self) -> None:
        """Ends the thread; jobs that are under way are refused (503)."""
        self._stopping = True
        self._orders.put(lambda: None)
        self._thread.join()

    # On the engine's thread

    def _run(self) -> None:
        try:
            with jax.set_mesh(self._mesh):
                while not self._stopping:
                    self._meters.observe(self._engine)
                    self._take_orders()
                    if self._jobs:
                        self._dispatch()
        finally:
            self._stopping = True
            self._end_all(Refused(503, "the server is shutting down"))

    def _take_orders(self) -> None:
        """All that have come; where there is nothing else to do, it waits for one."""
        if not self._jobs:
            self._orders.get()()
        while not self._orders.empty():
            self._orders.get()()

    def _dispatch(self) -> None:
        try:
            generated = self._engine.generate(self._params)
        except Exception as problem:  # of the device or the engine: all that it had is lost
            log.exception("a dispatch of the engine failed")
            self._meters.failures.inc()
            self._engine.release()
            self._end_all(Refused(500, f"the engine failed ({type(problem).__name__}); try again"))
            return
        for made in generated:
            job = self._jobs[made.slot]
            if made.finish:
                self._forget(job)
            job.deliver(made)

    def _start(self, job: Job) -> None:
        try:
            job.slot = self._engine.submit(job.request)
        except ValueError as problem:
            self._leave()
            job.deliver(Refused(400, str(problem)))
        else:
            self._jobs[job.slot] = job

    def _cancel(self, job: Job) -> None:
        if self._jobs.get(job.slot) is job:
            self._engine.free(job.slot)
            self._forget(job)

    def _end_all(self, why: Refused) -> None:
        for job in list(self._jobs.values()):
            self._forget(job)
            job.deliver(why)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.slot]
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._n_jobs -= 1
