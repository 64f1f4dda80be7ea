"""Which prompts a step gets: shuffled anew in every epoch, restorable to the exact next batch."""

from collections.abc import Sequence
from typing import cast

import grain

from jaxrl.types import Prompt


class PromptIterator:
    """Endless batches of exactly `prompts_per_step` prompts, each prompt at most once per epoch.

    An epoch is len(prompts) // prompts_per_step batches. What is left over (fewer prompts than a
    batch) is dropped: with shuffle another part of the data in every epoch, without it always the tail.

    The order is a pure function of (seed, epoch), by grain's index shuffle in this process, so the
    state is the number of batches taken and a restore costs nothing.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, prompts_per_step: int, shuffle: bool, seed: int
    ):
        if len(prompts) < prompts_per_step:
            raise ValueError(
                f"{len(prompts)} prompts do not fill one step of {prompts_per_step}; lower "
                "data.prompts_per_step or give more data in data.train"
            )
        self._prompts = prompts
        self._identity = {
            "n_prompts": len(prompts),
            "prompts_per_step": prompts_per_step,
            "shuffle": shuffle,
            "seed": seed,
        }
        order = grain.MapDataset.source(range(len(prompts))).seed(seed)
        if shuffle:
            order = order.shuffle()
        self.steps_per_epoch = len(prompts) // prompts_per_step
        # repeat() gives every epoch its own shuffle; batch comes first, so no batch spans two epochs
        self._batches = order.batch(prompts_per_step, drop_remainder=True, batch_fn=list).repeat()
        self._step = 0

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._step // self.steps_per_epoch

    def __iter__(self) -> "PromptIterator":
        return self

    def __next__(self) -> list[Prompt]:
        indices = cast(list[int], self._batches[self._step])
        batch = [self._prompts[index] for index in indices]
        self._step += 1
        return batch

    def state(self) -> dict:
        """What restore() needs, JSON-able."""
        return {"step": self._step, **self._identity}

    def restore(self, state: dict) -> None:
        """Continues after the batch that was the last one when `state` was taken."""
        for name, value in self._identity.items():
            if state[name] != value:
                raise ValueError(
                    f"the checkpoint's data iterator has {name} = {state[name]}, this run {value}; "
                    "resume with the data, seed, data.shuffle and data.prompts_per_step it was "
                    "saved with, or start in a new run_dir"
                )
        self._step = int(state["step"])
