"""The one thread that owns the engine and the device. Others hand it requests and get tokens back."""

import dataclasses
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
from jax.sharding import Mesh

from jaxrl.engine.api import Generated, Request
from jaxrl.engine.engine import PagedEngine
from jaxrl.serve.errors import Refused
from jaxrl.serve.metrics import Meters
from jaxrl.types import Tree

log = logging.getLogger(__name__)

Deliver = Callable[[Generated | Refused], None]


@dataclasses.dataclass(eq=False)
class Job:
    """One response under way. `deliver` is called on the engine's thread, last with a finish or a
    refusal; after a cancel it may be called a few times more."""

    request: Request
    deliver: Deliver
    kept: bool = False  # its weights stay when it has ended, until `conclude` or `cancel`
    slot: int = -1  # of the engine, once it has the request
    step: int | None = None  # of the weights, from then on


class EngineThread:
    """Runs dispatch after dispatch while there are jobs; between two of them it takes in new jobs and
    cancels old ones.

    A job sees one version of the weights: new ones wait until all jobs have ended, and jobs that come
    meanwhile wait for them.
    """

    def __init__(
        self,
        engine: PagedEngine,
        params: Tree,
        mesh: Mesh,
        meters: Meters,
        *,
        most_jobs: int,
        step: int | None = None,
    ):
        """At most `most_jobs` may be under way, those that wait included. `step` is that of the parameters
        where they are of a run."""
        self._engine, self._params, self._mesh, self._meters = engine, params, mesh, meters
        self.most_jobs = most_jobs
        self.step = step
        meters.weights_step.set(math.nan if step is None else step)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # by slot
        self._kept: set[Job] = set()  # that have ended, but for `conclude`
        self._update: tuple[Callable[[], Tree], int] | None = None
        self._held_back: list[Job] = []  # until then
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
        self._orders.put(lambda: self._begin(jobs))

    def cancel(self, job: Job) -> None:
        """Ends a job and frees its pages; nothing happens where it has ended."""
        self._orders.put(lambda: self._cancel(job))

    def conclude[T](self, job: Job, work: Callable[[Tree], T]) -> Future[T]:
        """Ends a job that is `kept`, and has the weights that it saw worked with."""
        future: Future[T] = Future()

        def order() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self._params))
                except Exception as problem:  # of the device
                    future.set_exception(problem)
            self._cancel(job)

        self._orders.put(order)
        return future

    @property
    def updating(self) -> bool:
        """Whether new weights wait for jobs to end."""
        return self._update is not None

    def update(self, place: Callable[[], Tree], step: int) -> None:
        """Has `place` bring new weights onto the devices once all jobs have ended and the old ones are freed."""
        assert not self.updating
        self._update = place, step
        self._orders.put(lambda: None)  # for a thread that waits for one

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
                    if self._update and not self._jobs and not self._kept:
                        self._take_update(*self._update)
                    self._take_orders()
                    if self._jobs:
                        self._dispatch()
        finally:
            self._stopping = True
            why = Refused(503, "the server is shutting down")
            for job in [*self._jobs.values(), *self._held_back]:
                job.deliver(why)

    def _take_update(self, place: Callable[[], Tree], step: int) -> None:
        for leaf in jax.tree.leaves(self._params):
            leaf.delete()
        self._params = place()
        self._engine.set_version(step)
        self.step, self._update = step, None
        self._meters.weights_step.set(step)
        log.info("serving the weights of step %d", step)
        jobs, self._held_back = self._held_back, []
        self._begin(jobs)

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
            why = Refused(500, f"the engine failed ({type(problem).__name__}); try again")
            for job in list(self._jobs.values()):
                self._ended(job)
                job.deliver(why)
            return
        for made in generated:
            job = self._jobs[made.slot]
            if made.finish:
                self._ended(job)
            job.deliver(made)

    def _begin(self, jobs: Sequence[Job]) -> None:
        if self._update:
            self._held_back += jobs
            return
        for job in jobs:
            self._start(job)

    def _start(self, job: Job) -> None:
        job.step = self.step
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
            del self._jobs[job.slot]
        elif job in self._kept:
            self._kept.remove(job)
        elif job in self._held_back:
            self._held_back.remove(job)
        else:
            return
        self._leave()

    def _ended(self, job: Job) -> None:
        del self._jobs[job.slot]
        if job.kept:
            self._kept.add(job)
        else:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._n_jobs -= 1
