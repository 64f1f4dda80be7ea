"""Discrete-event model of a run: engine replicas, a trainer, and the schedule between them.

Time advances from event to event: a response ends, or a training step ends. Between two events a
replica decodes a fixed set of sequences, so the time of k decode steps is a closed form. Groups
start in the order of their prompts.

The schedules (AReaL, arXiv:2505.24298, section 5.1; partial rollouts: Kimi k1.5, arXiv:2501.12599,
section 2.6.2):

- sync: the devices generate the groups of one step, then train on them.
- partial: the same devices, with more groups in flight than a step needs. A step trains as soon as
  enough groups are complete; unfinished responses resume under the new weights.
- async: rollout devices generate without pause; the trainer takes complete groups.

At most (max_staleness + 1) steps of groups are started and not yet trained, and a step waits for
groups that would otherwise become too old. So no group is ever dropped.
"""

import collections
import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

TRAINER = -1  # in place of a replica, in events


@dataclasses.dataclass(frozen=True)
class Usage:
    """Seconds that one decode step of a replica takes of a resource (compute, HBM, links)."""

    fixed_s: int | float = 0.0
    per_sequence_s: int | float = 0.0
    per_key_s: int | float = 0.0  # of each key that a sequence attends to


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of the compiled programs. Resources overlap: the slowest one bounds a step."""

    decode: tuple[Usage, ...]
    prefill_s: float  # per token, of a replica
    train_s: float  # per token of prompts and responses, scoring included
    train_pair_s: float  # per token and key: a sequence of T tokens has T^2 / 2 pairs
    update_s: float  # of a training step, whatever its tokens
    transfer_s: float  # of new weights to the replicas


@dataclasses.dataclass(frozen=True)
class Engines:
    """Engine replicas of the rollout."""

    n_replicas: int
    slots: int  # sequences that a replica decodes at the same time


@dataclasses.dataclass(frozen=True)
class Schedule:
    mode: str  # "sync" | "partial" | "async"
    max_staleness: int = 0  # in training steps
    oversample: int | float = 2.0  # groups in flight of "partial", in steps
    keep_kv: bool = False  # of running responses when the weights change, instead of a prefill
    order: str = "prompt"  # "async": of training; "arrival" takes any complete groups

    @property
    def strict(self) -> bool:
        """Whether a step takes exactly the next groups in the order of their prompts."""
        return self.mode == "async" and self.order == "prompt"

    def in_flight(self, groups_per_step: int) -> int:
        """Largest number of groups that are started and not yet trained."""
        steps = {"sync": 1.0, "partial": min(self.oversample, self.max_staleness + 1)}
        return int(steps.get(self.mode, self.max_staleness + 1) * groups_per_step)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Means over the training steps after the first ones."""

    step_s: float
    tokens_per_s: float  # trained response tokens
    rollout_idle: float  # share of the time in which a replica has no response to decode
    trainer_idle: float  # share of the time in which the trainer waits; 0 on shared devices
    staleness_mean: float  # of responses, from the version of the first token
    staleness_max: int
    versions_per_response: float


@dataclasses.dataclass
class _Replica:
    """Sequences of one engine replica, and the time up to which it has decoded them."""

    slots: int
    # Heap of (step at which a response ends, its group, version of its first token, last keys).
    ends: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    time: float = 0.0
    step: int = 0
    keys: int = 0
    prompt: int = -1  # group whose prompt is in the prefix cache
    busy_s: float = 0.0
    stamp: int = 0  # of its newest event; older events are void

    def decode_s(self, n_steps: int, decode: Sequence[Usage]) -> float:
        """Time of `n_steps` decode steps of the present sequences."""
        n = len(self.ends)
        keys = self.keys + n * (n_steps - 1) / 2  # mean over the steps
        return n_steps * max(
            [use.fixed_s + use.per_sequence_s * n + use.per_key_s * keys for use in decode]
        )

    def decode_until(self, now: float, decode: Sequence[Usage]) -> None:
        """Decodes up to `now`; a step under way is finished."""
        if not self.ends or self.time >= now:
            self.time = max(self.time, now)
            return
        left, spent = now - self.time, self.ends[0][0] - self.step
        if self.decode_s(spent, decode) > left + 1e-9:
            low, high = 0, spent  # fewest steps that take `left`
            while high - low > 1:
                middle = (low + high) // 2
                fits = self.decode_s(middle, decode) < left - 1e-9
                low, high = (middle, high) if fits else (low, middle)
            spent = high
        self.spend(self.decode_s(spent, decode))
        self.step += spent
        self.keys += spent * len(self.ends)

    def spend(self, seconds: float) -> None:
        self.time += seconds
        self.busy_s += seconds


@dataclasses.dataclass
class _Step:
    end_s: float
    train_s: float
    n_tokens: int  # of responses
    ages: list[int]  # staleness of its responses
    n_versions: int  # summed over its responses
    rollout_s: float = 0.0  # busy time of all replicas since the start of the run


@dataclasses.dataclass
class _Group:
    """The responses of a prompt, from the start of the first one to the training step."""

    n_left: int  # responses that have not ended
    starts: list[int] = dataclasses.field(default_factory=list)  # version of each first token
    n_versions: int = 0  # that sampled tokens, summed over its responses


class _Simulation:
    def __init__(
        self,
        costs: Costs,
        engines: Engines,
        schedule: Schedule,
        lengths: np.ndarray,
        *,
        prompt_len: int,
        groups_per_step: int,
    ):
        self.costs, self.schedule, self.lengths = costs, schedule, lengths.tolist()
        self.prompt_len, self.per_step = prompt_len, groups_per_step
        self.shared = schedule.mode != "async"  # rollout and training on the same devices
        self.replicas = [_Replica(engines.slots) for _ in range(engines.n_replicas)]
        self.events: list[tuple[float, int, int]] = []  # time, stamp, replica
        self.waiting: collections.deque[tuple[int, int]] = collections.deque()  # group, length
        self.n_started = self.version = 0
        self.groups: dict[int, _Group] = {}  # started and not yet trained
        self.complete: set[int] = set()
        self.training = self.has_news = False  # news: a complete group or an idle trainer
        self.steps: list[_Step] = []

    def run(self, n_steps: int) -> None:
        now = 0.0
        self._start_groups(now)
        while self.version < n_steps:
            if self.has_news and not self.training:
                self.has_news = False
                self._train(now)
            now, stamp, index = heapq.heappop(self.events)
            if index == TRAINER:
                self._end_step(now)
            elif stamp == self.replicas[index].stamp:
                self._end_responses(index, now)

    def _start_groups(self, now: float) -> None:
        limit = self.version * self.per_step + self.schedule.in_flight(self.per_step)
        for group in range(self.n_started, limit):
            lengths = self._lengths_of(group)
            self.groups[group] = _Group(n_left=len(lengths))
            self.waiting.extend((group, length) for length in lengths)
        self.n_started = max(self.n_started, limit)
        self._fill_slots(now)

    def _lengths_of(self, group: int) -> list[int]:
        return self.lengths[group % len(self.lengths)]

    def _fill_slots(self, now: float) -> None:
        """Starts waiting responses, those of a prompt on the replica with the most free slots."""
        changed = set()
        while self.waiting:
            index = min(range(len(self.replicas)), key=lambda i: len(self.replicas[i].ends))
            replica = self.replicas[index]
            if len(replica.ends) == replica.slots:
                break
            if index not in changed:
                replica.decode_until(now, self.costs.decode)
                changed.add(index)
            self._start_on(replica, self.waiting[0][0])
        for index in changed:
            self._announce(index)

    def _start_on(self, replica: _Replica, group: int) -> None:
        """Starts the waiting responses of a group that the replica has slots for."""
        if replica.prompt != group:
            replica.spend(self.prompt_len * self.costs.prefill_s)
            replica.prompt = group
        while len(replica.ends) < replica.slots and self.waiting and self.waiting[0][0] == group:
            _, length = self.waiting.popleft()
            end = replica.step + length, group, self.version, self.prompt_len + length
            heapq.heappush(replica.ends, end)
            replica.keys += self.prompt_len
            self.groups[group].starts.append(self.version)

    def _announce(self, index: int) -> None:
        """Queues the event of the next response that ends on a replica."""
        replica = self.replicas[index]
        replica.stamp += 1
        if replica.ends:
            n_steps = replica.ends[0][0] - replica.step
            end = replica.time + replica.decode_s(n_steps, self.costs.decode)
            heapq.heappush(self.events, (end, replica.stamp, index))

    def _end_responses(self, index: int, now: float) -> None:
        replica = self.replicas[index]
        replica.decode_until(now, self.costs.decode)
        while replica.ends and replica.ends[0][0] <= replica.step:
            _, group, start, keys = heapq.heappop(replica.ends)
            replica.keys -= keys
            self.groups[group].n_left -= 1
            self.groups[group].n_versions += self.version - start + 1
            if not self.groups[group].n_left:
                self.complete.add(group)
                self.has_news = True
        self._announce(index)
        self._fill_slots(now)

    def _train(self, now: float) -> None:
        """Begins a training step if its groups are complete. Shared devices stop decoding."""
        if (numbers := self._next_groups()) is None:
            return
        self.training = True
        if self.shared:
            for replica in self.replicas:
                replica.decode_until(now, self.costs.decode)
                replica.stamp += 1  # no event until the weights are new
            now = max(replica.time for replica in self.replicas)
        groups = [self.groups.pop(number) for number in numbers]
        self.complete -= set(numbers)
        lengths = [length for number in numbers for length in self._lengths_of(number)]
        totals = [self.prompt_len + length for length in lengths]
        seconds = self.costs.update_s + sum(totals) * self.costs.train_s
        seconds += sum(total**2 for total in totals) / 2 * self.costs.train_pair_s
        self.steps.append(
            _Step(
                end_s=now + seconds,
                train_s=seconds,
                n_tokens=sum(lengths),
                ages=[self.version - start for group in groups for start in group.starts],
                n_versions=sum(group.n_versions for group in groups),
            )
        )
        heapq.heappush(self.events, (now + seconds, 0, TRAINER))

    def _next_groups(self) -> list[int] | None:
        """The groups of the next step, the oldest complete ones; None while it must wait.

        It waits for an older group if training that one later could exceed max_staleness, given
        that every step takes as many groups as this one.
        """
        n = self.per_step
        if len(self.complete) < n:
            return None
        if self.schedule.strict:
            oldest = list(range(self.version * n, (self.version + 1) * n))
            return oldest if self.complete.issuperset(oldest) else None
        oldest = sorted(self.complete)[:n]
        later = [g for number, g in self.groups.items() if g.starts and number not in set(oldest)]
        deadlines = sorted(group.starts[0] + self.schedule.max_staleness for group in later)
        if any(self.version + 1 + i // n > last for i, last in enumerate(deadlines)):
            return None
        return oldest

    def _end_step(self, now: float) -> None:
        """New weights: replicas load them, and compute the KV of running responses again."""
        self.training, self.has_news, self.version = False, True, self.version + 1
        for index, replica in enumerate(self.replicas):
            if self.shared:
                replica.time = now
            replica.decode_until(now, self.costs.decode)
            replica.spend(self.costs.transfer_s)
            replica.prompt = -1
            if not self.schedule.keep_kv:
                replica.spend(replica.keys * self.costs.prefill_s)
            self._announce(index)
        self.steps[-1].rollout_s = sum(replica.busy_s for replica in self.replicas)
        self._start_groups(now)


def simulate(
    costs: Costs,
    engines: Engines,
    schedule: Schedule,
    lengths: np.ndarray,
    *,
    prompt_len: int,
    groups_per_step: int,
    n_steps: int = 7,
    n_warmup: int = 3,
) -> Outcome:
    """The steady state of a run whose groups have responses of `lengths` [groups, samples].

    Groups repeat after the last. The first `n_warmup` of `n_steps` training steps are not counted.
    """
    run = _Simulation(
        costs, engines, schedule, lengths, prompt_len=prompt_len, groups_per_step=groups_per_step
    )
    run.run(n_steps)
    before, counted = run.steps[n_warmup - 1], run.steps[n_warmup:]
    seconds = counted[-1].end_s - before.end_s
    train_s = sum(step.train_s for step in counted)
    replica_s = engines.n_replicas * seconds
    decode_s = counted[-1].rollout_s - before.rollout_s
    paused_s = engines.n_replicas * train_s if run.shared else 0.0
    ages = [age for step in counted for age in step.ages]
    return Outcome(
        step_s=seconds / len(counted),
        tokens_per_s=sum(step.n_tokens for step in counted) / seconds,
        rollout_idle=max(replica_s - paused_s - decode_s, 0.0) / replica_s,
        trainer_idle=0.0 if run.shared else 1 - train_s / seconds,
        staleness_mean=sum(ages) / len(ages),
        staleness_max=max(ages),
        versions_per_response=sum(step.n_versions for step in counted) / len(ages),
    )
