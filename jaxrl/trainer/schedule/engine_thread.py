"""A thread that generates batch after batch while the trainer trains (schedule.mode = "async").

    engine   | batch 0 | batch 1 | batch 2 | batch 3 |     lag = 1
    weights  |     version 0     |    1    |    2    |
    trainer            | step 0  | step 1  | step 2  |

The trainer orders batch n when it takes batch n - lag, with the weights that it has then. So the
engine is at most `lag` batches ahead, and weights change between two batches, at a defined point of
its dispatches. Unfinished responses of later batches continue under them. What a token depends on
is fixed: data, seed and earlier steps, not the clock.
"""

import collections
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence

from jaxrl.data.iterator import PromptOutcome
from jaxrl.engine.api import EngineStats
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.trainer.schedule.generator import GroupGenerator, InFlight
from jaxrl.types import Tree

POLL_S = 0.02  # between looks at rewards and signals while there is nothing to generate
Check = Callable[[], None]  # raises to stop waiting


@dataclasses.dataclass(frozen=True)
class BatchOrder:
    """An order of the trainer: one more batch."""

    step: int  # that its prompts are drawn for
    version: int  # of the weights
    params: Tree | None  # the weights, on the engine's devices; None: as in the order before
    fresh: bool  # compute the KV of unfinished responses again
    outcomes: Sequence[PromptOutcome] = ()  # mean rewards of prompts, for its draws and later ones


@dataclasses.dataclass(frozen=True)
class GeneratedBatch:
    """The groups of a batch, and how the engine generated them."""

    groups: list[PromptGroup]
    stats: EngineStats
    busy_s: float  # generating
    idle_s: float  # without an order before that, since the batch before
    metrics: dict[str, float]  # of the buffer after it

    @property
    def scored(self) -> bool:
        return all(group.rewards is not None for group in self.groups)


class Closed(Exception):
    """The run has ended."""


class EngineThread:
    """The thread that owns the generator, its engine and its rewards, except while it is held.

    All methods are called by the trainer's thread.
    """

    def __init__(
        self,
        generator: GroupGenerator,
        lag: int,
        on_mesh: Callable[[], contextlib.AbstractContextManager],
    ):
        """`on_mesh` sets the mesh of the engine, which is a setting of a thread."""
        self.generator, self._on_mesh = generator, on_mesh
        self._last: collections.deque[GeneratedBatch] = collections.deque(maxlen=lag)
        self._changed = threading.Condition()  # guards what follows
        self._orders: collections.deque[BatchOrder] = collections.deque()
        self._n_ordered = self._n_taken = 0  # batches
        self._batches: dict[int, GeneratedBatch] = {}  # generated and not taken, by number
        self._snapshots: dict[int, InFlight] = {}  # before the batch of a number, ...
        self._n_done = -1  # ... of which this is the last
        self._held = False  # the trainer uses the generator
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def n_ahead(self) -> int:
        """Batches that are ordered and not taken."""
        return self._n_ordered - self._n_taken

    def order(self, order: BatchOrder) -> None:
        """Orders one more batch. Ends a `hold`."""
        with self._changed:
            self._orders.append(order)
            self._n_ordered += 1
            self._held = False
            self._changed.notify_all()

    def take(self, check: Check) -> GeneratedBatch:
        """Waits for the next batch and its rewards. Raises the error of a thread that failed.

        `check` is called while it waits.
        """
        number = self._n_taken

        def scored() -> bool:
            return number in self._batches and self._batches[number].scored

        self._wait(scored, check)
        with self._changed:
            self._n_taken += 1
            return self._batches.pop(number)

    def hold(self, check: Check) -> None:
        """Waits until all orders are done; the caller may then use the generator until the next."""
        self._wait(self._idle, check)
        with self._changed:
            self._held = True
        self.generator.loop.release()

    def mark(self) -> Callable[[Check], InFlight]:
        """A function that gives what is in flight once all orders of this moment are done.

        It includes the batches that have not been taken by now. If the engine fails or `check`
        raises, the engine is stopped, and it gives what is in flight then.
        """
        number = self._n_ordered
        with self._changed:
            self._snapshots = {n: one for n, one in self._snapshots.items() if n >= number}

        def snapshot(check: Check) -> InFlight:
            with contextlib.suppress(Exception):
                self._wait(lambda: number in self._snapshots, check)
            if number not in self._snapshots:
                self.close()
            return self._snapshots.get(number) or self.generator.snapshot()

        return snapshot

    def close(self) -> None:
        """Stops the thread after its dispatch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _idle(self) -> bool:
        return self._n_done == self._n_ordered

    def _wait(self, done: Callable[[], bool], check: Check) -> None:
        with self._changed:
            while not done():
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise Closed("the engine's thread was stopped")
                self._changed.wait(POLL_S)
                check()

    def _run(self) -> None:
        try:
            with self._on_mesh():
                self._generate()
        except Closed:
            pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _generate(self) -> None:
        params = None
        for number in itertools.count():
            start = time.perf_counter()
            order = self._next_order(number)
            params = params if order.params is None else order.params
            ordered = time.perf_counter()
            idle_s = ordered - start if number else 0.0
            batch = self._generate_batch(order, params, idle_s)
            self._last.append(batch)
            with self._changed:
                self._batches[number] = batch
                self._changed.notify_all()

    def _next_order(self, number: int) -> BatchOrder:
        """Waits for the order of a batch. Polls the rewards of earlier ones meanwhile."""
        in_flight = self.generator.snapshot(
            [group for batch in self._last for group in batch.groups]
        )
        with self._changed:
            self._snapshots[number], self._n_done = in_flight, number
            self._changed.notify_all()
            while not self._orders:
                self._check_closed()
                if not self._held:
                    self.generator.poll_rewards(wait=False)
                    self._changed.notify_all()
                self._changed.wait(POLL_S)
            return self._orders.popleft()

    def _generate_batch(self, order: BatchOrder, params: Tree, idle_s: float) -> GeneratedBatch:
        generator, start = self.generator, time.perf_counter()
        if order.fresh:
            generator.loop.release()
        generator.loop.engine.take_stats()
        generator.iterator.record(order.outcomes)
        generator.begin(order.step, order.version)
        groups = generator.generate(params, order.step, self._check_closed)
        return GeneratedBatch(
            groups,
            generator.loop.engine.take_stats(),
            busy_s=time.perf_counter() - start,
            idle_s=idle_s,
            metrics=generator.take_metrics(),
        )

    def _check_closed(self) -> None:
        if self._closed:
            raise Closed
