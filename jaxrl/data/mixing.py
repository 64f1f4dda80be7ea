"""Batches that mix sources by weight, in memory or streamed."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from jaxrl.data.iterator import PromptOutcome, check_identity, solved
from jaxrl.data.source_rates import SourceCurriculum, SourceRates
from jaxrl.types import Prompt


@runtime_checkable
class Stream[T](Protocol):
    """The endless items of one source."""

    @property
    def items(self) -> Sequence[T]: ...

    @property
    def n_solved(self) -> int: ...

    def __len__(self) -> int: ...

    def mark_solved(self, ids: Iterable[int]) -> None: ...

    def take(self, n: int) -> list[T]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class MixedIterator[T]:
    """Endless batches of `prompts_per_step` items with the shares of the sources set by weights.

    Item by item, each source earns its share and the one that has earned most gives the next item
    (smooth weighted round robin). So a source has its share of any number of items, to within as
    many as there are sources, without random numbers. The weights change linearly from `weights`
    to `final_weights` over `ramp` batches. A source that ends starts again, in a new order.
    """

    def __init__(
        self,
        sources: Sequence[Stream[T]],
        *,
        prompts_per_step: int,
        weights: Sequence[float],
        final_weights: Sequence[float] = (),
        ramp: int = 0,
        skip_solved: float = 0.0,
        curriculum: SourceCurriculum | None = None,
        identity: Mapping[str, Any],
    ):
        """`identity` is the part of the state that must not change between a run and its resume.

        With a `curriculum` the shares follow the mean rewards of the sources, whose items must be
        in memory.
        """
        self._rates = None
        if curriculum is not None:
            ids = [[cast(Prompt, item).id for item in source.items] for source in sources]
            self._rates = SourceRates(curriculum, ids)
            identity = {**identity, "curriculum": _settings(curriculum)}
        self._sources, self._size, self._skip = sources, prompts_per_step, skip_solved
        self._weights, self._ramp = shares(weights), ramp
        self._final = shares(final_weights) if final_weights else self._weights
        self._identity = {
            "prompts_per_step": prompts_per_step,
            "weights": [self._weights, self._final, ramp],
            "skip_solved": skip_solved > 0,
            **identity,
        }
        self._position = 0  # batches consumed
        self._earned = [0.0] * len(sources)
        self.steps_per_epoch = max(sum(map(len, sources)) // prompts_per_step, 1)

    @property
    def items(self) -> Sequence[T]:
        """All items in the order of the sources; of a streamed source its first row's items."""
        return [item for source in self._sources for item in source.items]

    def record(self, outcomes: Iterable[PromptOutcome]) -> None:
        """Skips the solved prompts, each in its source, and moves the shares of a curriculum."""
        outcomes = list(outcomes)
        if self._rates is not None:
            self._rates.record(outcomes)
        if self._skip:
            ids = set(solved(outcomes, self._skip))
            for source in self._sources:
                source.mark_solved(ids)

    def metrics(self) -> dict[str, float]:
        """Number of prompts that are skipped, and the curriculum; {} without both."""
        n_solved = sum(source.n_solved for source in self._sources)
        found = {"data/solved": float(n_solved)} if self._skip else {}
        return found | (self._rates.metrics(self._shares()) if self._rates else {})

    def __iter__(self) -> "MixedIterator[T]":
        return self

    def __next__(self) -> list[T]:
        order = self._next_sources()
        found = [
            iter(source.take(order.count(i))) if i in order else iter(())
            for i, source in enumerate(self._sources)
        ]
        self._position += 1
        return [next(found[i]) for i in order]

    def _next_sources(self) -> list[int]:
        """The source of each item of the next batch."""
        now, order = self._shares(), []
        for _ in range(self._size):
            self._earned = [have + share for have, share in zip(self._earned, now, strict=True)]
            best = max(range(len(now)), key=lambda i: self._earned[i])
            self._earned[best] -= 1.0
            order.append(best)
        return order

    def _shares(self) -> list[float]:
        """The share of each source in the next batch."""
        progress = min(self._position / self._ramp, 1.0) if self._ramp else 1.0
        now = [
            first + (last - first) * progress
            for first, last in zip(self._weights, self._final, strict=True)
        ]
        return now if self._rates is None else self._rates.shares(now)

    def state(self) -> dict[str, Any]:
        """JSON-serializable state for restore()."""
        sources = [source.state() for source in self._sources]
        position = {"step": self._position, "earned": self._earned, "sources": sources}
        rates = {} if self._rates is None else {"rates": self._rates.state()}
        return position | rates | self._identity

    def restore(self, state: dict) -> None:
        """Continues with the batch after `state` was taken. Raises ValueError for other data."""
        check_identity(state, self._identity)
        self._position, self._earned = int(state["step"]), [float(x) for x in state["earned"]]
        if self._rates is not None:
            self._rates.restore(state["rates"])
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.restore(saved)


def most_per_step(prompts_per_step: int, share: float, n_sources: int) -> int:
    """An upper bound of the items of a source in a batch."""
    return min(prompts_per_step, math.floor(prompts_per_step * share) + n_sources)


def shares(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum."""
    return [weight / sum(weights) for weight in weights]


def _settings(curriculum: SourceCurriculum) -> dict[str, Any]:
    """The settings of a curriculum as JSON has them."""
    found = dataclasses.asdict(curriculum)
    return found | {"memories": list(curriculum.memories)}
