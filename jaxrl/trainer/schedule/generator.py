"""Generation of groups in flight, batch after batch: draws prompts, runs the engine, scores groups.

Its order of draws, dispatches and batches does not depend on the clock, unless groups are taken by
arrival. Rewards are computed by their processes while the engine generates.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrl.config.keys import RunConfig
from jaxrl.data.iterator import Batches
from jaxrl.rollout.engines import generating_processes
from jaxrl.rollout.loop import RolloutLoop
from jaxrl.rollout.schedule import saved
from jaxrl.rollout.schedule.buffer import NOT_STARTED, GroupBuffer, PromptGroup
from jaxrl.trainer.core import sampling_seed
from jaxrl.types import Prompt, Reward, Rollout, Tree
from sharding import hosts


@dataclasses.dataclass(frozen=True)
class Draw:
    """One draw of prompts from the data."""

    number: int
    state: Mapping[str, Any]  # of the data iterator before it


@dataclasses.dataclass(frozen=True)
class InFlight:
    """Everything in flight at one moment, for the checkpoint."""

    position: Mapping[str, Any]  # state of the data iterator
    draws: tuple[Draw, ...]
    n_draws: int
    groups: tuple[saved.GroupState, ...]

    def json(self) -> dict[str, Any]:
        draws = [dataclasses.asdict(draw) for draw in self.draws]
        fields = {"position": self.position, "draws": draws, "n_draws": self.n_draws}
        return fields | saved.encode(self.groups)


@runtime_checkable
class Rewards(Protocol):
    """Scores rollouts in other processes, as RewardPool does."""

    def submit(self, rollouts: Sequence[Rollout]) -> int: ...

    def collect(self, *, wait: bool) -> dict[int, list[Reward]]: ...


class GroupGenerator:
    """The groups in flight, the engine that generates them, and the processes that score them."""

    def __init__(
        self,
        cfg: RunConfig,
        loop: RolloutLoop,
        rewards: Rewards,
        iterator: Batches[Prompt],
    ):
        """The first processes draw all prompts, and each generates its slice of each draw."""
        self.n_processes = generating_processes(cfg)
        schedule = cfg.schedule
        mine = hosts.local_slice(cfg.data.prompts_per_step, self.n_processes)
        self._indices = range(mine.start, mine.stop)  # of its prompts in a draw
        size = len(self._indices)
        self.cfg, self.loop, self.rewards, self.iterator = cfg, loop, rewards, iterator
        self.buffer = GroupBuffer(
            size,
            max_started=schedule.max_started(size),
            max_staleness=schedule.max_staleness,
            arrival=schedule.order == "arrival",
        )
        self.n_dropped = 0
        self._draws: dict[int, Draw] = {}
        self._n_draws = 0
        self._n_draws_at = (-1, 0)  # (step, draws at it)
        self._scoring: dict[int, PromptGroup] = {}  # by ticket of the reward pool

    def begin(self, step: int, version: int) -> None:
        """Draws and starts groups for the batch of `step`, and continues the unfinished responses.

        `version` is the version of the weights for the next dispatches.
        """
        self._drop_stale(step)
        while self.buffer.n_missing > 0:
            self._draw(step)
        self.buffer.start(version)
        self.loop.resume(version, self.buffer.started)
        for group in self.buffer.started:
            self._arrive(group)

    def generate(self, params: Tree, step: int, check: Callable[[], None]) -> list[PromptGroup]:
        """Runs the engine until the batch of `step` is ready, and takes it.

        `check` is called after every dispatch.
        """
        while (batch := self.buffer.next_batch(step)) is None:
            for group in self.loop.dispatch(params) if self.loop.n_unfinished else ():
                self._arrive(group)
            self.poll_rewards(wait=not self.loop.n_unfinished)
            check()
        self.buffer.take(batch)
        return batch

    def wait_for_rewards(self, batch: Sequence[PromptGroup], check: Callable[[], None]) -> None:
        """Returns once the rewards of all groups of the batch are known."""
        while any(group.rewards is None for group in batch):
            self.poll_rewards(wait=True)
            check()

    def poll_rewards(self, *, wait: bool) -> None:
        """Takes the rewards that are known, after waiting for news of the processes if `wait`."""
        for ticket, rewards in self.rewards.collect(wait=wait).items():
            if (group := self._scoring.pop(ticket, None)) is not None:  # not dropped
                group.rewards = rewards
                self._arrive(group)

    def take_metrics(self) -> dict[str, float]:
        """Groups that are started and not taken, those dropped since the last call, and more."""
        n_dropped, self.n_dropped = self.n_dropped, 0
        return {
            "buffer/size": float(len(self.buffer.started)),
            "buffer/dropped": float(n_dropped),
        } | self.loop.take_metrics()

    def snapshot(self, done: Sequence[PromptGroup] = ()) -> InFlight:
        """Everything in flight now; `done` are groups that were taken but not trained on."""
        groups = [*done, *self.buffer.started, *self.buffer.waiting]
        used = {group.draw for group in groups}
        draws = tuple(draw for number, draw in self._draws.items() if number in used)
        self._draws = {draw.number: draw for draw in draws}
        states = tuple(saved.group_states(groups))
        return InFlight(self.iterator.state(), draws, self._n_draws, states)

    def restore(self, processes: Sequence[Mapping[str, Any]]) -> None:
        """Continues with what was in flight in all processes, after drawing its prompts again.

        What only some of them had drawn is drawn later.
        """
        first = min(processes, key=lambda values: values["n_draws"])
        self._n_draws = first["n_draws"]
        draws = {
            fields["number"]: Draw(**fields) for values in processes for fields in values["draws"]
        }
        self._draws = {n: draw for n, draw in sorted(draws.items()) if n < self._n_draws}
        prompts = {}
        for number, draw in draws.items():
            self.iterator.restore(dict(draw.state))
            prompts[number] = next(self.iterator)
        self.iterator.restore(first["position"])
        groups = [
            group
            for values in processes
            for group in saved.decode(values, lambda draw, index: prompts[draw][index])
            if group.index in self._indices and group.draw < self._n_draws
        ]
        if len(processes) > 1:  # in prompt order, also if there are now fewer processes
            groups.sort(key=lambda group: (group.draw, group.index))
        for group in groups:
            (self.buffer.waiting if group.version == NOT_STARTED else self.buffer.started).append(
                group
            )

    def _arrive(self, group: PromptGroup) -> None:
        """Has a complete group scored, and makes it ready: at once, or with its rewards."""
        if group.rollouts is None or group.ready:
            return
        if group.rewards is None and group not in self._scoring.values():
            self._scoring[self.rewards.submit(group.rollouts)] = group
        if group.rewards is not None or not self.buffer.arrival:
            self.buffer.arrive(group)

    def _drop_stale(self, step: int) -> None:
        """Drops the groups that are too old for the batch of `step`."""
        dropped = self.buffer.drop_stale(step)
        if dropped:
            self.n_dropped += len(dropped)
            self.loop.release()
            self._scoring = {t: g for t, g in self._scoring.items() if g not in dropped}

    def _draw(self, step: int) -> None:
        """Draws one batch of prompts."""
        state = self.iterator.state()
        n = self._n_draws_at[1] if self._n_draws_at[0] == step else 0
        self._n_draws_at = step, n + 1
        draw = Draw(self._n_draws, state)
        self._draws[draw.number] = draw
        self._n_draws += 1
        seed = sampling_seed(self.cfg.seed, step, validation=False, draw=n)
        prompts = next(self.iterator)
        for index in self._indices:
            self.buffer.waiting.append(PromptGroup(prompts[index], seed, draw.number, index))
