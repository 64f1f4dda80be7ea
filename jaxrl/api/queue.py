"""The queue of training requests: one at a time on the device, in turns between clients."""

import asyncio
import collections
import contextlib
import logging
from collections.abc import Awaitable, Callable

from jaxrl.api.store import DONE, FAILED, Store, failure
from jaxrl.http.errors import RequestError

log = logging.getLogger(__name__)

RequestWork = Callable[[], Awaitable[bytes]]  # the body of the result
Queued = collections.deque[tuple[str, RequestWork]]  # the requests of a client, in order


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
    """Runs requests one after the other: those of a client in order, and clients in turns."""

    def __init__(self, results: Results, max_queued: int):
        self._results, self._max_queued = results, max_queued
        self._waiting: dict[str, Queued] = {}  # by client, the next one first
        self._added = asyncio.Event()

    def check_room(self, owner: str) -> None:
        """Raises RequestError (429) if the client has too many requests in the queue."""
        if len(self._waiting.get(owner, ())) >= self._max_queued:
            raise RequestError(
                429, f"{self._max_queued} training requests are queued; try again later"
            )

    def add(self, owner: str, request: str, work: RequestWork) -> None:
        self._results.expect(request)
        self._waiting.setdefault(owner, collections.deque()).append((request, work))
        self._added.set()

    async def run(self) -> None:
        """Runs the queued work until it is cancelled."""
        while True:
            await self._added.wait()
            owner = next(iter(self._waiting), None)
            if owner is None:
                self._added.clear()
                continue
            queue = self._waiting.pop(owner)
            request, work = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # after all others
            await self._results.run(request, work)
