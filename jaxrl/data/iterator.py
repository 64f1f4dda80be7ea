"""Batches of a dataset: shuffled every epoch, resumable at the exact next batch."""

from collections.abc import Iterable, Sequence
from typing import cast

import grain

from jaxrl.types import Prompt


class BatchIterator[T]:
    """Endless batches of exactly `prompts_per_step` items, each at most once per epoch.

    Items are prompts, demonstrations or preference pairs. An epoch has
    len(items) // prompts_per_step batches. The remainder is dropped: a different part of the data
    every epoch with `shuffle`, always the last items without.

    `skip_solved` skips prompts that were marked as solved. The order then runs from one epoch into
    the next without dropping a remainder. When fewer than a batch are unsolved, the marks are
    cleared.

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
        skip_solved: bool = False,
    ):
        if len(items) < prompts_per_step:
            raise ValueError(
                f"{len(items)} prompts do not fill one step of {prompts_per_step}; lower "
                "data.prompts_per_step or add data to data.train"
            )
        self._items = items
        self._size, self._skip = prompts_per_step, skip_solved
        self._solved: set[int] = set()  # prompt ids
        self._identity = {
            "n_prompts": len(items),
            "prompts_per_step": prompts_per_step,
            "shuffle": shuffle,
            "seed": seed,
            "skip_solved": skip_solved,
        }
        order = grain.MapDataset.source(range(len(items))).seed(seed)
        if shuffle:
            order = order.shuffle()
        self.steps_per_epoch = len(items) // prompts_per_step
        # repeat() reshuffles every epoch; batch() comes first, so no batch spans two epochs
        self._batches = order.batch(prompts_per_step, drop_remainder=True, batch_fn=list).repeat()
        self._stream = order.repeat()
        self._position = 0  # batches consumed; with skip_solved prompts consumed or skipped

    @property
    def items(self) -> Sequence[T]:
        """All items, in the order of the dataset."""
        return self._items

    @property
    def n_solved(self) -> int:
        """Number of prompts that are skipped."""
        return len(self._solved)

    def mark_solved(self, ids: Iterable[int]) -> None:
        """Skips these prompts from now on. No effect without `skip_solved`."""
        if self._skip:
            self._solved.update(ids)

    def __iter__(self) -> "BatchIterator[T]":
        return self

    def __next__(self) -> list[T]:
        if self._skip:
            return self._next_unsolved()
        indices = cast(list[int], self._batches[self._position])
        self._position += 1
        return [self._items[index] for index in indices]

    def _next_unsolved(self) -> list[T]:
        if len(self._items) - len(self._solved) < self._size:
            self._solved.clear()
        batch: dict[int, T] = {}  # a batch that spans two epochs has no prompt twice
        while len(batch) < self._size:
            item = self._items[cast(int, self._stream[self._position])]
            self._position += 1
            prompt_id = cast(Prompt, item).id
            if prompt_id not in self._solved:
                batch.setdefault(prompt_id, item)
        return list(batch.values())

    def state(self) -> dict[str, int | bool | list[int]]:
        """JSON-serializable state for restore()."""
        return {"step": self._position, "solved": sorted(self._solved), **self._identity}

    def restore(self, state: dict) -> None:
        """Continues with the batch after `state` was taken. Raises ValueError for other data."""
        for name, value in self._identity.items():
            if state[name] != value:
                raise ValueError(
                    f"the checkpoint's data iterator has {name} = {state[name]}, this run {value}; "
                    "resume with the data, seed, data.shuffle, data.skip_solved and "
                    "data.prompts_per_step it was saved with, or start in a new run_dir"
                )
        self._position, self._solved = int(state["step"]), set(state["solved"])
