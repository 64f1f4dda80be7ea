"""Which items a step gets: shuffled anew in every epoch, restorable to the exact next batch."""

from collections.abc import Iterable, Sequence
from typing import cast

import grain

from jaxrl.types import Prompt


class BatchIterator[T]:
    """Endless batches of exactly `prompts_per_step` prompts (or what else is learnt), each at most once per epoch.

    An epoch is len(items) // prompts_per_step batches. What is left over (fewer prompts than a
    batch) is dropped: with shuffle another part of the data in every epoch, without it always the tail.

    With `skip_solved` prompts that were marked as solved are passed over, the order goes on from one
    epoch to the next without a rest, and once fewer than a batch are left unsolved all are asked again.

    The order is a pure function of (seed, epoch), by grain's index shuffle in this process, so the
    state is the number of batches (or prompts) taken and what is solved, and a restore costs nothing.
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
                "data.prompts_per_step or give more data in data.train"
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
        # repeat() gives every epoch its own shuffle; batch comes first, so no batch spans two epochs
        self._batches = order.batch(prompts_per_step, drop_remainder=True, batch_fn=list).repeat()
        self._stream = order.repeat()
        self._step = 0  # batches taken; with skip_solved prompts looked at

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._step // (len(self._items) if self._skip else self.steps_per_epoch)

    @property
    def n_solved(self) -> int:
        """Prompts that are passed over."""
        return len(self._solved)

    def mark_solved(self, ids: Iterable[int]) -> None:
        """Prompts that need not be asked again. Has no effect without `skip_solved`."""
        if self._skip:
            self._solved.update(ids)

    def __iter__(self) -> "BatchIterator[T]":
        return self

    def __next__(self) -> list[T]:
        if self._skip:
            return self._next_unsolved()
        indices = cast(list[int], self._batches[self._step])
        self._step += 1
        return [self._items[index] for index in indices]

    def _next_unsolved(self) -> list[T]:
        if len(self._items) - len(self._solved) < self._size:
            self._solved.clear()
        batch: dict[int, T] = {}  # a batch that spans two epochs has no prompt twice
        while len(batch) < self._size:
            item = self._items[cast(int, self._stream[self._step])]
            self._step += 1
            name = cast(Prompt, item).id
            if name not in self._solved:
                batch.setdefault(name, item)
        return list(batch.values())

    def state(self) -> dict:
        """What restore() needs, JSON-able."""
        return {"step": self._step, "solved": sorted(self._solved), **self._identity}

    def restore(self, state: dict) -> None:
        """Continues after the batch that was the last one when `state` was taken."""
        for name, value in self._identity.items():
            if state[name] != value:
                raise ValueError(
                    f"the checkpoint's data iterator has {name} = {state[name]}, this run {value}; "
                    "resume with the data, seed, data.shuffle, data.skip_solved and data.prompts_per_step it was "
                    "saved with, or start in a new run_dir"
                )
        self._step, self._solved = int(state["step"]), set(state["solved"])
