"""Device calls that the host dispatches before it reads the results of earlier ones."""

import collections
from collections.abc import Callable
from types import TracebackType

MAX_IN_FLIGHT = 2  # one runs, and the next is ready: the devices do not wait for the host


class CallQueue:
    """Dispatched calls in order, each with a function that waits for its result and reads it.

    At most `limit` of them are unread when one more is dispatched, so that the devices hold the
    inputs of as many. The end of a block with it reads all of them, unless it ends with an error.
    """

    def __init__(self, limit: int = MAX_IN_FLIGHT):
        self._limit = limit
        self._reads: collections.deque[Callable[[], None]] = collections.deque()

    def __enter__(self) -> "CallQueue":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self._read_until(0)
        self._reads.clear()

    def make_room(self) -> None:
        """Reads the oldest calls until one more may be dispatched; call it before that."""
        self._read_until(self._limit - 1)

    def add(self, read: Callable[[], None]) -> None:
        """Adds a dispatched call."""
        self._reads.append(read)

    def _read_until(self, n: int) -> None:
        while len(self._reads) > n:
            self._reads.popleft()()
