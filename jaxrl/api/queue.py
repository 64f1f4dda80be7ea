"""The queue of training requests: in turns between clients, and calls of several in a dispatch."""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from jaxrl.api.lanes import OptimizerCall, SharedCall, TrainingCall
from jaxrl.api.store import DONE, FAILED, GroupCommit, RequestResult, Store, failure
from jaxrl.http.errors import RequestError

log = logging.getLogger(__name__)

GATHER_S = 0.02  # for which a dispatch waits at most for the calls of models that take part in turn

RequestWork = Callable[[], Awaitable[bytes]]  # the body of the result
QueuedWork = RequestWork | SharedCall


@dataclasses.dataclass(frozen=True)
class QueuedRequest:
    """A request in the queue."""

    owner: str
    model: str
    id: str
    work: QueuedWork


class Results:
    """Runs the work of requests and records its outcome, for which clients may wait."""

    def __init__(self, store: Store, commits: GroupCommit):
        self._store, self._commits = store, commits
        self._ended: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task] = set()  # asyncio itself keeps no reference
        self._unrecorded: dict[str, RequestResult] = {}  # errors of results that were not stored

    def expect(self, request: str) -> None:
        """The work of this request will be run."""
        self._ended.setdefault(request, asyncio.Event())

    def start(self, request: str, work: RequestWork) -> None:
        """Runs the work next to others."""
        self.expect(request)
        task = asyncio.create_task(self.run(request, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self, request: str, work: RequestWork) -> None:
        """Runs the work and records the body of its result, or its error."""
        state = FAILED
        try:
            state, body = DONE, await work()
        except RequestError as error:
            state, body = FAILED, failure(error.message, by_client=error.status < 500)
        except ValueError as error:
            body = failure(str(error), by_client=True)
        except Exception as error:  # of the device: other requests continue
            log.exception("the request %s failed", request)
            body = failure(f"the server failed ({type(error).__name__})", by_client=False)
        try:
            try:
                self._store.end(request, state, body)
            finally:  # SQLite may have undone changes of others, too: they fail now
                await self._commits.wait()
        except Exception as error:  # of the disk: other requests continue
            log.exception("the result of the request %s cannot be stored", request)
            message = f"the server could not store the result ({type(error).__name__})"
            self._unrecorded[request] = RequestResult(FAILED, failure(message, by_client=False))
        self._ended.pop(request).set()

    def result(self, request: str, owner: str) -> RequestResult:
        """The outcome so far; `wait` waits for one. Raises RequestError as Store.result does."""
        found = self._store.result(request, owner)
        return self._unrecorded.get(request, found)

    def end_polls(self) -> None:
        """Ends the waiting of all clients, for example before a shutdown."""
        for ended in self._ended.values():
            ended.set()

    async def cancel(self) -> None:
        """Ends the work that runs next to others, without a result."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait(self, request: str, timeout_s: float) -> None:
        """Returns when the request has ended, or after the timeout."""
        if (ended := self._ended.get(request)) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), timeout_s)


class TrainingQueue:
    """Runs requests of training: those of a model in order, and clients in turns.

    Calls of the same kind share dispatches: one lane of each in turns, until a dispatch is full.
    Optimizer steps come before further gradients, and a dispatch waits a moment for the models of
    the last ones, so that clients with the same work stay together. Other requests run one at a
    time.
    """

    def __init__(
        self,
        results: Results,
        run_calls: Callable[[Sequence[SharedCall]], Awaitable[None]],
        max_lanes: Callable[[SharedCall], int],
        max_queued: int,
    ):
        """`run_calls` runs the next lane of each call, at most max_lanes(call) of one kind."""
        self._results, self._run_calls = results, run_calls
        self._max_lanes, self._max_queued = max_lanes, max_queued
        # By client and by model; of both, and of the requests of a model, the next one first.
        self._waiting: dict[str, dict[str, collections.deque[QueuedRequest]]] = {}
        self._n_accepted: collections.Counter[str] = collections.Counter()  # by client
        self._added = asyncio.Event()
        self._stepped = False  # by the last dispatch
        # The models of the last two dispatches of lanes, whose next calls are expected soon.
        self._recent: collections.deque[set[str]] = collections.deque(maxlen=2)

    def check_room(self, owner: str) -> None:
        """Raises RequestError (429) if the client has too many requests in the queue."""
        if self._n_accepted[owner] >= self._max_queued:
            raise RequestError(
                429, f"{self._max_queued} training requests are queued; try again later"
            )

    def accept(self, owner: str) -> None:
        """Counts a request from now on, which `add` or `drop` then follows."""
        self._n_accepted[owner] += 1

    def drop(self, owner: str) -> None:
        """Counts an accepted request no longer."""
        self._n_accepted[owner] -= 1
        if not self._n_accepted[owner]:
            del self._n_accepted[owner]

    def add(self, owner: str, model: str, request: str, work: QueuedWork) -> None:
        """Queues an accepted request."""
        self._results.expect(request)
        queue = self._waiting.setdefault(owner, {}).setdefault(model, collections.deque())
        queue.append(QueuedRequest(owner, model, request, work))
        self._added.set()

    async def run(self) -> None:
        """Runs the queued work until it is cancelled."""
        while True:
            await self._added.wait()
            first = next(self._heads(), None)
            if first is None:
                self._added.clear()
            elif isinstance(first.work, SharedCall):
                await self._run_shared()
            else:
                self._remove(first)
                await self._results.run(first.id, first.work)

    def _heads(self) -> Iterator[QueuedRequest]:
        """The next request of each model, in turns between clients."""
        of_clients = [list(models.values()) for models in self._waiting.values()]
        for turn in itertools.zip_longest(*of_clients):
            yield from (queue[0] for queue in turn if queue is not None)

    def _calls(self) -> list[tuple[QueuedRequest, SharedCall]]:
        """The calls among the next requests."""
        heads = [(head, head.work) for head in self._heads()]
        return [(head, work) for head, work in heads if isinstance(work, SharedCall)]

    async def _run_shared(self) -> None:
        """Runs a dispatch of the steps among the next requests, else of lanes of one kind."""
        calls = [call for _, call in self._calls()]
        steps = [call for call in calls if isinstance(call, OptimizerCall)]
        if steps and not (self._stepped and len(steps) < len(calls)):  # all kinds have a turn
            await self._dispatch(steps[0])
            self._stepped = True
            return
        self._stepped = False
        await self._gather()
        await self._dispatch(next(c for _, c in self._calls() if isinstance(c, TrainingCall)))

    async def _gather(self) -> None:
        """Waits until all models of the last dispatches are there, but at most GATHER_S."""
        expected = set().union(*self._recent)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_S):
                while expected - {head.model for head in self._heads()}:
                    self._added.clear()
                    await self._added.wait()
        self._added.set()

    async def _dispatch(self, first: SharedCall) -> None:
        """Runs lanes of the calls of this kind that are next, and ends those that are complete."""
        calls = [(head, call) for head, call in self._calls() if call.kind == first.kind]
        lanes = _in_turns([call for _, call in calls], self._max_lanes(first))
        for head, call in calls:
            if call in lanes:
                self._to_end(head)
        if isinstance(first, TrainingCall):
            self._recent.append({call.model for call in lanes})
        await self._run_calls(lanes)
        ended = [(head, call) for head, call in calls if not call.n_left]
        for head, _ in ended:
            self._remove(head)
        await asyncio.gather(*(self._results.run(head.id, call.output) for head, call in ended))

    def _to_end(self, head: QueuedRequest) -> None:
        """Lets all other clients, and the other models of the client, have the next turn."""
        models = self._waiting.pop(head.owner)
        models[head.model] = models.pop(head.model)
        self._waiting[head.owner] = models

    def _remove(self, head: QueuedRequest) -> None:
        """Takes the next request of a model out of the queue."""
        self._to_end(head)
        self.drop(head.owner)
        models = self._waiting[head.owner]
        models[head.model].popleft()
        if not models[head.model]:
            del models[head.model]
        if not models:
            del self._waiting[head.owner]


def _in_turns(calls: Sequence[SharedCall], n: int) -> list[SharedCall]:
    """The calls of the next `n` lanes: one lane of each, then a second one, ..."""
    n_left, chosen = [call.n_left for call in calls], []
    while len(chosen) < n and any(n_left):
        for i, call in enumerate(calls):
            if n_left[i] and len(chosen) < n:
                n_left[i] -= 1
                chosen.append(call)
    return chosen
