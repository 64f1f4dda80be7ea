"""Batches of a dataset that several threads read."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxrl.data.iterator import Batches, PromptOutcome


class SharedBatches[T]:
    """Implements `Batches` with the batches of another iterator, one thread at a time."""

    def __init__(self, batches: Batches[T]):
        self.steps_per_epoch = batches.steps_per_epoch
        self._batches, self._lock = batches, threading.Lock()

    @property
    def items(self) -> Sequence[T]:
        return self._batches.items

    def record(self, outcomes: Iterable[PromptOutcome]) -> None:
        with self._lock:
            self._batches.record(outcomes)

    def metrics(self) -> dict[str, float]:
        with self._lock:
            return self._batches.metrics()

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        with self._lock:
            return next(self._batches)

    def state(self) -> dict[str, Any]:
        with self._lock:
            return self._batches.state()

    def restore(self, state: dict) -> None:
        with self._lock:
            self._batches.restore(state)
