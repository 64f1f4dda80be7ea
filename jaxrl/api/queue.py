"""The queue of training requests: in turns between clients, and calls of several in a dispatch."""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from jaxrl.api.lanes import TrainingCall
from jaxrl.api.store import DONE, FAILED, Store, failure
from jaxrl.http.errors import RequestError

log = logging.getLogger(__name__)

RequestWork = Callable[[], Awaitable[bytes]]  # the body of the result
QueuedWork = RequestWork | TrainingCall


@dataclasses.dataclass(frozen=True)
class QueuedRequest:
    """A request in the queue."""

    owner: str
    model: str
    id: str
    work: QueuedWork


class Results:
    """Runs the work of requests and records its outcome, for which clients may wait."""

    def __init__(self, store: Store):
        self._store = store
        self._ended: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task] = set()  # asyncio itself keeps no reference

    def expect(self, request: str) -> None:
        """The work of this request will be run."""
        self._ended[request] = asyncio.Event()

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
        await asyncio.to_thread(self._store.end, request, state, body)
        self._ended.pop(request).set()

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

    Calls of forward and forward_backward of the same kind share dispatches: one lane of each in
    turns, until a dispatch is full. Other requests run one at a time.
    """

    def __init__(
        self,
        results: Results,
        run_lanes: Callable[[Sequence[TrainingCall]], Awaitable[None]],
        max_lanes: Callable[[int], int],
        max_queued: int,
    ):
        """`run_lanes` runs the next lane of each call, at most max_lanes(T) lanes of T tokens."""
        self._results, self._run_lanes = results, run_lanes
        self._max_lanes, self._max_queued = max_lanes, max_queued
        # By client and by model; of both, and of the requests of a model, the next one first.
        self._waiting: dict[str, dict[str, collections.deque[QueuedRequest]]] = {}
        self._added = asyncio.Event()

    def check_room(self, owner: str) -> None:
        """Raises RequestError (429) if the client has too many requests in the queue."""
        if sum(map(len, self._waiting.get(owner, {}).values())) >= self._max_queued:
            raise RequestError(
                429, f"{self._max_queued} training requests are queued; try again later"
            )

    def add(self, owner: str, model: str, request: str, work: QueuedWork) -> None:
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
            elif isinstance(first.work, TrainingCall):
                await self._dispatch(first.work.kind)
            else:
                self._remove(first)
                await self._results.run(first.id, first.work)

    def _heads(self) -> Iterator[QueuedRequest]:
        """The next request of each model, in turns between clients."""
        of_clients = [list(models.values()) for models in self._waiting.values()]
        for turn in itertools.zip_longest(*of_clients):
            yield from (queue[0] for queue in turn if queue is not None)

    async def _dispatch(self, kind: tuple[int, bool]) -> None:
        """Runs lanes of the calls of this kind that are next, and ends those that are complete."""
        calls = [
            (head, head.work)
            for head in self._heads()
            if isinstance(head.work, TrainingCall) and head.work.kind == kind
        ]
        lanes = _in_turns([call for _, call in calls], self._max_lanes(kind[0]))
        for head, call in calls:
            if call in lanes:
                self._to_end(head)
        await self._run_lanes(lanes)
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
        models = self._waiting[head.owner]
        models[head.model].popleft()
        if not models[head.model]:
            del models[head.model]
        if not models:
            del self._waiting[head.owner]


def _in_turns(calls: Sequence[TrainingCall], n: int) -> list[TrainingCall]:
    """The calls of the next `n` lanes: one lane of each, then a second one, ..."""
    n_left, chosen = [call.n_left for call in calls], []
    while len(chosen) < n and any(n_left):
        for i, call in enumerate(calls):
            if n_left[i] and len(chosen) < n:
                n_left[i] -= 1
                chosen.append(call)
    return chosen
