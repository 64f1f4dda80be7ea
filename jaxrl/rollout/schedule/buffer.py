"""Groups of responses between the dataset and the trainer: bounded, in a fixed order, never stale.

With B prompts per step and at most `max_staleness` = s, at most (s + 1) B groups are started and
not yet taken, so that every group can be in a step before it is s versions old: a step takes B.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from jaxrl.rollout.turns import Response
from jaxrl.types import Prompt, Reward, Rollout

NOT_STARTED = -1


@dataclasses.dataclass(eq=False)
class PromptGroup:
    """The responses to one prompt, from the draw of the prompt to the step that trains on them."""

    prompt: Prompt
    seed: int  # of the samples
    draw: int  # number of the draw of prompts that it is from, from 0
    index: int  # of its prompt in that draw
    # Once they are started, as far as they are sampled; none in groups of episodes
    responses: list[Response] = dataclasses.field(default_factory=list)
    version: int = NOT_STARTED  # policy version when it was started
    rollouts: list[Rollout] | None = None  # once all responses or episodes have ended
    rewards: list[Reward] | None = None  # of the rollouts, once they are known
    ready: bool = False  # may be trained on


class GroupBuffer:
    """The groups in flight: drawn, started, or complete.

    In prompt order, a step takes the first groups, whichever completes first. By arrival, it takes
    the first groups that are ready, except where others would become too old for later steps.
    """

    def __init__(self, batch_size: int, *, max_started: int, max_staleness: int, arrival: bool):
        """`max_started` is at least `batch_size` and at most (max_staleness + 1) batch_size."""
        self.batch_size, self.max_started = batch_size, max_started
        self.max_staleness, self.arrival = max_staleness, arrival
        self.waiting: collections.deque[PromptGroup] = collections.deque()  # drawn, not started
        self.started: list[PromptGroup] = []  # and not taken; in prompt order
        self._arrived: list[PromptGroup] = []  # those that are ready, in order of arrival

    @property
    def n_missing(self) -> int:
        """Groups to draw before `start`, so that it can start as many as the bound allows."""
        return self.max_started - len(self.started) - len(self.waiting)

    def start(self, version: int) -> list[PromptGroup]:
        """Starts drawn groups, in order, as many as the bound allows. Returns them."""
        n = min(self.max_started - len(self.started), len(self.waiting))
        groups = [self.waiting.popleft() for _ in range(n)]
        for group in groups:
            group.version = version
        self.started += groups
        return groups

    def arrive(self, group: PromptGroup) -> None:
        """Marks a started group as ready."""
        group.ready = True
        self._arrived.append(group)

    def drop_stale(self, version: int) -> list[PromptGroup]:
        """Removes and returns the groups that are too old to be trained on from `version` on."""
        stale = [g for g in self.started if version - g.version > self.max_staleness]
        self._remove(stale)
        return stale

    def next_batch(self, version: int) -> list[PromptGroup] | None:
        """The groups of the next batch at this policy version; None while they are not ready."""
        first = self.started[: self.batch_size]
        found = self._first_arrived(version) if self.arrival else first
        whole = len(found) == self.batch_size and all(group.ready for group in found)
        return found if whole else None

    @property
    def n_ready(self) -> int:
        """How many of the groups of the next batch are ready."""
        groups = self._arrived if self.arrival else self.started[: self.batch_size]
        return min(sum(group.ready for group in groups), self.batch_size)

    def take(self, batch: Sequence[PromptGroup]) -> None:
        """Removes the groups of a batch, whose step begins."""
        self._remove(batch)

    def _first_arrived(self, version: int) -> list[PromptGroup]:
        chosen: list[PromptGroup] = []
        for group in self._arrived:
            n_free = self.batch_size - len(chosen) - 1  # if this group is in the batch
            if n_free >= self._n_urgent(version, [*chosen, group]):
                chosen.append(group)
        return chosen

    def _n_urgent(self, version: int, chosen: Sequence[PromptGroup]) -> int:
        """How many other groups must be in the batch of `version`, so that none becomes too old.

        Earliest deadline first: of the groups whose last step is d or earlier, the steps after this
        one take at most (d - version) batch_size.
        """
        taken = set(map(id, chosen))
        last = sorted(g.version + self.max_staleness for g in self.started if id(g) not in taken)
        needed = [i + 1 - (d - version) * self.batch_size for i, d in enumerate(last)]
        return max([0, *needed])

    def _remove(self, groups: Iterable[PromptGroup]) -> None:
        gone = set(map(id, groups))
        self.started = [g for g in self.started if id(g) not in gone]
        self._arrived = [g for g in self._arrived if id(g) not in gone]
