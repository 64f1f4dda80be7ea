"""The one thread that owns the engine and the device; other threads submit tasks to it."""

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
from jaxrl.http.errors import RequestError
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.rollout.request_images import request_images
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.types import PlacedImage, Tree

log = logging.getLogger(__name__)

Deliver = Callable[[Generated | RequestError], None]


@dataclasses.dataclass(eq=False)
class GenerationTask:
    """Generation of one choice.

    `deliver` runs on the engine's thread; the last call has a finish reason or an error. A few
    calls may still come after a cancellation.
    """

    request: Request
    deliver: Deliver
    # The weights stay loaded after generation ends, until `finish_with_weights` or `cancel`.
    keep_weights: bool = False
    images: tuple[PlacedImage, ...] = ()  # of the prompt
    encoder: ImageEncoder | None = None  # computes their features; None: there are none
    slot: int = -1  # of the engine, once submitted to it
    step: int | None = None  # training step of the weights, once submitted to the engine


class ServingThread:
    """Runs engine dispatches while there are tasks; starts and cancels tasks between dispatches.

    A task sees one version of the weights. New weights are loaded when all running tasks have
    ended; tasks submitted in the meantime are deferred until then.
    """

    def __init__(
        self,
        engine: PagedEngine,
        params: Tree,
        mesh: Mesh,
        metrics: ServerMetrics,
        *,
        max_tasks: int,
        step: int | None = None,
    ):
        """`max_tasks` bounds running and queued tasks together.

        `step` is the training step of `params`, or None if they are not from a checkpoint.
        """
        self._engine, self._params, self._mesh, self._metrics = engine, params, mesh, metrics
        self.max_tasks = max_tasks
        self.step = step
        metrics.weights_step.set(math.nan if step is None else step)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tasks: dict[int, GenerationTask] = {}  # by engine slot
        self._keeping_weights: set[GenerationTask] = set()  # generation ended, scoring has not
        self._new_weights: tuple[Callable[[Tree], Tree], int] | None = None
        self._deferred: list[GenerationTask] = []  # until the new weights are loaded
        self._accepted: set[GenerationTask] = set()  # running, queued and not yet submitted
        self._lock = threading.Lock()  # of the accepted tasks and the end of the thread
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called by other threads

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def submit(self, tasks: Sequence[GenerationTask]) -> None:
        """Accepts all tasks or none.

        Raises RequestError (429) at the limit of `max_tasks`, (503) if the thread has ended.
        """
        with self._lock:
            if not self.alive:
                raise RequestError(
                    503, "the server is shutting down; send the request to another server"
                )
            if (n_tasks := len(self._accepted)) + len(tasks) > self.max_tasks:
                raise RequestError(
                    429,
                    f"{n_tasks} responses are in progress and the limit is {self.max_tasks}; "
                    "try again later",
                    code="overloaded",
                )
            self._accepted.update(tasks)
        self._commands.put(lambda: self._start_or_defer(tasks))

    def cancel(self, task: GenerationTask) -> None:
        """Ends a task and frees its pages; does nothing if it has ended."""
        self._commands.put(lambda: self._cancel(task))

    def finish_with_weights[T](self, task: GenerationTask, work: Callable[[Tree], T]) -> Future[T]:
        """Runs `work` on the weights of a task with `keep_weights`, then ends the task."""
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self._params))
                except Exception as error:  # of the device
                    future.set_exception(error)
            self._cancel(task)

        self._commands.put(command)
        return future

    def run[T](self, work: Callable[[Tree], tuple[Tree, T]]) -> Future[T]:
        """Runs `work` on the weights between two dispatches; the result is the second part.

        The first part are the weights from then on. Those of the running tasks must stay the same.
        Raises RequestError (503) if the thread has ended.
        """
        if not self.alive:
            raise RequestError(503, "the server is shutting down")
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    self._params, result = work(self._params)
                    future.set_result(result)
                except Exception as error:  # of the request, or of the device
                    future.set_exception(error)

        self._commands.put(command)
        return future

    @property
    def updating(self) -> bool:
        """Whether new weights are waiting for running tasks to end."""
        return self._new_weights is not None

    def update_weights(self, place: Callable[[Tree], Tree], step: int) -> None:
        """Calls `place` with the old weights, which it may free, once all tasks have ended.

        It returns the new ones.
        """
        assert not self.updating
        self._new_weights = place, step
        self._commands.put(lambda: None)  # wakes the thread if it is idle

    def stop(self) -> None:
        """Ends the thread; unfinished tasks fail with 503."""
        self.request_stop()
        self._thread.join()

    def request_stop(self) -> None:
        """As `stop`, without waiting for the current dispatch to end."""
        self._stopping = True
        self._commands.put(lambda: None)

    # On the engine's thread

    def _run(self) -> None:
        with jax.set_mesh(self._mesh):
            try:
                while not self._stopping:
                    self._metrics.observe(self._engine)
                    if self._new_weights and not self._tasks and not self._keeping_weights:
                        self._load_weights(*self._new_weights)
                    self._run_commands()
                    if self._tasks:
                        self._dispatch()
            finally:
                self._end_tasks()

    def _end_tasks(self) -> None:
        """Fails all tasks that generate or are queued; tasks that are being scored are finished."""
        with self._lock:  # no task is accepted from here on
            self._stopping, unfinished = True, self._accepted - self._keeping_weights
        for task in unfinished:
            task.deliver(RequestError(503, "the server is shutting down"))
        self._run_queued()

    def _load_weights(self, place: Callable[[Tree], Tree], step: int) -> None:
        self._params = place(self._params)
        self._engine.set_version(step)
        self.step, self._new_weights = step, None
        self._metrics.weights_step.set(step)
        log.info("serving the weights of step %d", step)
        tasks, self._deferred = self._deferred, []
        self._start_or_defer(tasks)

    def _run_commands(self) -> None:
        """Runs all queued commands; blocks for one if no task is running."""
        if not self._tasks:
            self._commands.get()()
        self._run_queued()

    def _run_queued(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _dispatch(self) -> None:
        try:
            results = self._engine.generate(self._params)
        except Exception as error:  # of the device or the engine: its state is lost
            log.exception("a dispatch of the engine failed")
            self._metrics.failures.inc()
            self._engine.release()
            failure = RequestError(500, f"the engine failed ({type(error).__name__}); try again")
            for task in list(self._tasks.values()):
                self._end_generation(task)
                task.deliver(failure)
            return
        for generated in results:
            task = self._tasks[generated.slot]
            if generated.finish:
                self._end_generation(task)
            task.deliver(generated)

    def _start_or_defer(self, tasks: Sequence[GenerationTask]) -> None:
        if self._new_weights:
            self._deferred += tasks
            return
        for task in tasks:
            self._start(task)

    def _start(self, task: GenerationTask) -> None:
        task.step = self.step
        try:
            images = request_images(task.images, task.encoder)
            task.slot = self._engine.submit(dataclasses.replace(task.request, images=images))
        except ValueError as error:
            self._forget(task)
            task.deliver(RequestError(400, str(error)))
        else:
            self._tasks[task.slot] = task

    def _cancel(self, task: GenerationTask) -> None:
        if self._tasks.get(task.slot) is task:
            self._engine.free(task.slot)
            del self._tasks[task.slot]
        elif task in self._keeping_weights:
            self._keeping_weights.remove(task)
        elif task in self._deferred:
            self._deferred.remove(task)
        else:
            return
        self._forget(task)

    def _end_generation(self, task: GenerationTask) -> None:
        del self._tasks[task.slot]
        if task.keep_weights:
            self._keeping_weights.add(task)
        else:
            self._forget(task)

    def _forget(self, task: GenerationTask) -> None:
        with self._lock:
            self._accepted.discard(task)
