"""Batches of a dataset: shuffled every epoch, resumable at the exact next batch."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import grain

from jaxrl.types import Prompt

PromptOutcome = tuple[int, float]  # id of a prompt, mean reward of its samples


@runtime_checkable
class Batches[T](Protocol):
    """Endless batches of items, resumable at the exact next batch."""

    steps_per_epoch: int

    @property
    def items(self) -> Sequence[T]:
        """All items in the order of the dataset; of streamed ones the first rows' items."""
        ...

    def record(self, outcomes: Iterable[PromptOutcome]) -> None:
        """Takes the mean rewards of prompts, for a curriculum. No effect without one."""
        ...

    def metrics(self) -> dict[str, float]:
        """data/*: the state of the curriculum."""
        ...

    def __iter__(self) -> Iterator[list[T]]: ...

    def __next__(self) -> list[T]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict) -> None: ...


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raises ValueError if `state` is from other data or another order."""
    for name, value in identity.items():
        if state.get(name) != value:
            raise ValueError(
                f"the checkpoint's data iterator has {name} = {state.get(name)}, this run {value}; "
                "resume with the data, seed, data.shuffle, data.skip_solved, data.weights, "
                "data.pool_*, data.progress*, data.gate* and data.prompts_per_step it was saved "
                "with, or start in a new run_dir"
            )


def solved(outcomes: Iterable[PromptOutcome], mean_reward: float) -> list[int]:
    """Ids of the prompts whose mean reward is at least `mean_reward`."""
    return [prompt_id for prompt_id, mean in outcomes if mean >= mean_reward]


def _epoch(n: int, shuffle: bool, seed: int) -> grain.MapDataset[int]:
    """The indices of `n` items; repeat() reshuffles them every epoch."""
    order = grain.MapDataset.source(range(n)).seed(seed)
    return order.shuffle() if shuffle else order


def _batches(n: int, size: int, shuffle: bool, seed: int) -> grain.MapDataset[list[int]]:
    """Endless lists of `size` indices, none of which spans two epochs."""
    epoch = _epoch(n, shuffle, seed)
    return epoch.batch(size, drop_remainder=True, batch_fn=list).repeat()


class EndlessItems[T]:
    """All items of a dataset again and again, in a new order every epoch with `shuffle`.

    Solved prompts are skipped until fewer than `min_left` are left; then the marks are cleared.
    The order is a pure function of (seed, epoch), by grain's index shuffle in this process.
    """

    def __init__(self, items: Sequence[T], *, shuffle: bool, seed: int, min_left: int):
        if len(items) < min_left:
            raise ValueError(
                f"{len(items)} prompts do not fill one step of {min_left}; lower "
                "data.prompts_per_step or the weight of the source, or add data to data.train"
            )
        self.items = items
        self._min_left = min_left
        self._order = _epoch(len(items), shuffle, seed).repeat()
        self._position = 0  # items consumed or skipped
        self._solved: set[int] = set()  # prompt ids

    def __len__(self) -> int:
        return len(self.items)

    @property
    def n_solved(self) -> int:
        return len(self._solved)

    @functools.cached_property
    def _ids(self) -> set[int]:
        return {cast(Prompt, item).id for item in self.items}

    def mark_solved(self, ids: Iterable[int]) -> None:
        """Skips the prompts that are items of this dataset."""
        self._solved.update(self._ids.intersection(ids))

    def take(self, n: int) -> list[T]:
        """The next n items, at most `min_left`; none is in them twice, also where an epoch ends."""
        if self._solved and len(self.items) - len(self._solved) < self._min_left:
            self._solved.clear()
        batch: dict[int, T] = {}
        while len(batch) < n:
            index = cast(int, self._order[self._position])
            self._position += 1
            item = self.items[index]
            if not self._solved or cast(Prompt, item).id not in self._solved:
                batch.setdefault(index, item)
        return list(batch.values())

    def state(self) -> dict[str, Any]:
        return {"step": self._position, "solved": sorted(self._solved)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._position, self._solved = int(state["step"]), set(state["solved"])


class StepItems[T]:
    """The items of every step: as many of a dataset again and again, shuffled in every epoch.

    They are a pure function of (seed, step), so there is no state to save.
    """

    def __init__(self, items: Sequence[T], *, per_step: int, shuffle: bool, seed: int):
        if len(items) < per_step:
            raise ValueError(
                f"{len(items)} demonstrations do not fill one step of {per_step}; lower "
                "data.demonstrations_per_step, or add data to data.demonstrations"
            )
        self.items = items
        self._batches = _batches(len(items), per_step, shuffle, seed)

    def of_step(self, step: int) -> list[T]:
        """The items of a step, counted from 0; none is in them twice."""
        return [self.items[index] for index in cast(list[int], self._batches[step])]


class BatchIterator[T]:
    """Endless batches of exactly `prompts_per_step` items, each at most once per epoch.

    Items are prompts, demonstrations or preference pairs. An epoch has
    len(items) // prompts_per_step batches. The remainder is dropped: a different part of the data
    every epoch with `shuffle`, always the last items without.

    With `skip_solved` above 0, prompts whose mean reward reaches it are skipped. The order then
    runs from one epoch into the next without dropping a remainder. When fewer than a batch are
    unsolved, the marks are cleared.

    The order is a pure function of (seed, epoch), by grain's index shuffle in this process. The
    state is the number of batches (or prompts) consumed and the solved ids, so restoring is free.
    """

    def __init__(
        self,
        items: Sequence[T],
        *,
        prompts_per_step: int,
        shuffle: bool,
        seed: int,
        skip_solved: float = 0.0,
    ):
        self._endless = EndlessItems(items, shuffle=shuffle, seed=seed, min_left=prompts_per_step)
        self._size, self._skip = prompts_per_step, skip_solved
        self._identity = {
            "n_prompts": len(items),
            "prompts_per_step": prompts_per_step,
            "shuffle": shuffle,
            "seed": seed,
            "skip_solved": skip_solved > 0,
        }
        self.steps_per_epoch = len(items) // prompts_per_step
        self._batches = _batches(len(items), prompts_per_step, shuffle, seed)
        self._position = 0  # batches consumed, without skip_solved

    @property
    def items(self) -> Sequence[T]:
        """All items, in the order of the dataset."""
        return self._endless.items

    def record(self, outcomes: Iterable[PromptOutcome]) -> None:
        """Skips the solved prompts from now on. No effect without `skip_solved`."""
        if self._skip:
            self._endless.mark_solved(solved(outcomes, self._skip))

    def metrics(self) -> dict[str, float]:
        """Number of prompts that are skipped; {} without `skip_solved`."""
        return {"data/solved": float(self._endless.n_solved)} if self._skip else {}

    def __iter__(self) -> "BatchIterator[T]":
        return self

    def __next__(self) -> list[T]:
        if self._skip:
            return self._endless.take(self._size)
        indices = cast(list[int], self._batches[self._position])
        self._position += 1
        return [self.items[index] for index in indices]

    def state(self) -> dict[str, Any]:
        """JSON-serializable state for restore()."""
        position = self._endless.state() if self._skip else {"step": self._position, "solved": []}
        return position | self._identity

    def restore(self, state: dict) -> None:
        """Continues with the batch after `state` was taken. Raises ValueError for other data."""
        check_identity(state, self._identity)
        if self._skip:
            self._endless.restore(state)
        self._position = int(state["step"])
