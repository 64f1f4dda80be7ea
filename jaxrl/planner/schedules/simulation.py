"""Discrete-event model of a run: engine replicas, a trainer, and the schedule between them.

Time advances from event to event: a response ends, a batch is generated, a training step ends, or
its weights arrive. Between two events a replica decodes a fixed set of sequences, so the time of k
decode steps is a closed form. Groups start in the order of their prompts.

The schedules (AReaL, arXiv:2505.24298, section 5.1; partial rollouts: Kimi k1.5, arXiv:2501.12599,
section 2.6.2), as jaxrl/trainer/schedule runs them:

- sync: the devices generate the groups of one step, then train on them.
- partial: the same devices, with more groups in flight than a step needs. A step trains as soon as
  its groups are complete; unfinished responses resume under the new weights.
- async: rollout devices generate batch after batch. The trainer orders batch n + 1 with its new
  weights before it waits for batch n, so the engine is at most one batch ahead. Groups start and
  weights change between two batches only.

Groups of later steps are in flight too, as many as max_staleness allows. No group is ever dropped.
"""

import collections
import dataclasses
import heapq

import numpy as np

from jaxrl.planner.schedules.replica import Replica, ReplicaUsage

# In place of a replica, in events: a training step, the transfer of its weights, or a batch ends.
TRAINER, WEIGHTS, BATCH = -1, -2, -3


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of the compiled programs. Resources overlap: the slowest one bounds a step."""

    decode: tuple[ReplicaUsage, ...]
    prefill_s: float  # per token, of a replica
    train_s: float  # per token of prompts and responses, scoring included
    train_pair_s: float  # per token and key: a sequence of T tokens has T^2 / 2 pairs
    update_s: float  # of a training step, whatever its tokens
    transfer_s: float  # of new weights to the replicas


@dataclasses.dataclass(frozen=True)
class SimulatedEngines:
    """Engine replicas of the rollout."""

    n_replicas: int
    slots: int  # sequences that a replica decodes at the same time


@dataclasses.dataclass(frozen=True)
class SimulatedSchedule:
    mode: str  # "sync" | "partial" | "async"
    max_staleness: int = 0  # in training steps
    oversample: int | float = 0.0  # steps of groups in flight; 0: as many as max_staleness allows
    keep_kv: bool = False  # of running responses when the weights change, instead of a prefill
    order: str = "prompt"  # of training; "arrival" takes any complete groups

    @property
    def lag(self) -> int:
        """Batches that are generated before the step before theirs has ended."""
        return min(1, self.max_staleness) if self.mode == "async" else 0

    def in_flight(self, groups_per_step: int) -> int:
        """Largest number of groups that are started and whose batch is not yet generated."""
        most = 1 if self.mode == "sync" else 1 + self.max_staleness - self.lag
        return int(min(self.oversample or most, most) * groups_per_step)


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

    version: int  # of the weights when it was started
    n_left: int  # responses that have not ended
    starts: list[int] = dataclasses.field(default_factory=list)  # version of each first token
    n_versions: int = 0  # that sampled tokens, summed over its responses


class _Simulation:
    def __init__(
        self,
        costs: Costs,
        engines: SimulatedEngines,
        schedule: SimulatedSchedule,
        lengths: np.ndarray,
        *,
        prompt_len: int,
        groups_per_step: int,
    ):
        self.costs, self.schedule, self.lengths = costs, schedule, lengths.tolist()
        self.prompt_len, self.per_step = prompt_len, groups_per_step
        self.shared = schedule.mode != "async"  # rollout and training on the same devices
        self.replicas = [Replica(engines.slots) for _ in range(engines.n_replicas)]
        self.events: list[tuple[float, int, int]] = []  # time, stamp, replica or what ends
        self.waiting: collections.deque[tuple[int, int]] = collections.deque()  # group, length
        self.orders: collections.deque[int] = collections.deque()  # versions to generate with
        self.batches: collections.deque[list[int]] = collections.deque()  # generated, not trained
        self.generating = self.paused = False  # neither: a batch's last decode step is under way
        self.n_started = self.n_batches = 0
        self.version = self.engine_version = 0
        self.groups: dict[int, _Group] = {}  # started and not yet trained
        self.complete: set[int] = set()  # and not in a batch
        self.training = False
        self.steps: list[_Step] = []

    def run(self, n_steps: int) -> None:
        self.paused = True
        for _ in range(1 + self.schedule.lag):
            self._order(0.0)
        while self.version < n_steps:
            now, stamp, index = heapq.heappop(self.events)
            if index == TRAINER:
                self._end_step(now)
            elif index == WEIGHTS:
                self.training = False
                self._order(now)
                self._train(now)
            elif index == BATCH:
                self.paused = True
                self._begin_batch(now)
                self._train(now)
            elif stamp == self.replicas[index].stamp:
                self._end_responses(index, now)

    def _order(self, now: float) -> None:
        """The trainer orders one more batch with its weights."""
        self.orders.append(self.version)
        self._begin_batch(now)

    def _begin_batch(self, now: float) -> None:
        """Loads the weights of the next order, if there is one, and starts groups."""
        if not self.paused or not self.orders:
            return
        before, self.engine_version = self.engine_version, self.orders.popleft()
        self.paused, self.generating = False, True
        for replica in self.replicas:
            replica.time = now
        self._start_groups()
        self._end_batch(now)
        if not self.generating:  # the batch was complete
            return
        for index, replica in enumerate(self.replicas):
            if self.engine_version != before:
                replica.prompt = -1
                if not self.schedule.keep_kv:  # the KV of running responses is computed again
                    replica.spend(replica.keys * self.costs.prefill_s)
            self._announce(index)
        self._fill_slots(now)

    def _start_groups(self) -> None:
        limit = self.n_batches * self.per_step + self.schedule.in_flight(self.per_step)
        for group in range(self.n_started, limit):
            lengths = self._lengths_of(group)
            self.groups[group] = _Group(self.engine_version, n_left=len(lengths))
            self.waiting.extend((group, length) for length in lengths)
        self.n_started = max(self.n_started, limit)

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

    def _start_on(self, replica: Replica, group: int) -> None:
        """Starts the waiting responses of a group that the replica has slots for."""
        if replica.prompt != group:
            replica.spend(self.prompt_len * self.costs.prefill_s)
            replica.prompt = group
        while len(replica.ends) < replica.slots and self.waiting and self.waiting[0][0] == group:
            _, length = self.waiting.popleft()
            end = replica.step + length, group, self.engine_version, self.prompt_len + length
            heapq.heappush(replica.ends, end)
            replica.keys += self.prompt_len
            self.groups[group].starts.append(self.engine_version)

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
            self.groups[group].n_versions += self.engine_version - start + 1
            if not self.groups[group].n_left:
                self.complete.add(group)
        self._announce(index)
        self._fill_slots(now)
        self._end_batch(now)

    def _end_batch(self, now: float) -> None:
        """Stops decoding if the groups of the next batch are complete."""
        if (numbers := self._next_groups()) is None:
            return
        self.generating = False
        for replica in self.replicas:
            replica.decode_until(now, self.costs.decode)
            replica.stamp += 1  # no event until the next batch begins
        self.complete -= set(numbers)
        self.batches.append(numbers)
        self.n_batches += 1
        heapq.heappush(self.events, (max(one.time for one in self.replicas), 0, BATCH))

    def _next_groups(self) -> list[int] | None:
        """The groups of the next batch; None while they are not complete.

        In prompt order these are the next groups. By arrival they are the oldest complete ones,
        except while a later batch would be too late for an older group, given that every step
        takes as many groups.
        """
        n, step = self.per_step, self.n_batches
        if len(self.complete) < n:
            return None
        if self.schedule.order == "prompt":
            first = list(range(step * n, (step + 1) * n))
            return first if self.complete.issuperset(first) else None
        oldest = sorted(self.complete)[:n]
        taken = set(oldest).union(*self.batches)
        later = [group for number, group in self.groups.items() if number not in taken]
        deadlines = sorted(group.version + self.schedule.max_staleness for group in later)
        if any(step + 1 + i // n > last for i, last in enumerate(deadlines)):
            return None
        return oldest

    def _train(self, now: float) -> None:
        """Begins a training step if its batch is generated."""
        if self.training or not self.batches:
            return
        self.training = True
        numbers = self.batches.popleft()
        groups = [self.groups.pop(number) for number in numbers]
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

    def _end_step(self, now: float) -> None:
        """New weights, which are then transferred. Async decodes meanwhile."""
        self.version += 1
        if self.generating:
            for index, replica in enumerate(self.replicas):
                replica.decode_until(now, self.costs.decode)
                self._announce(index)
        self.steps[-1].rollout_s = sum(replica.busy_s for replica in self.replicas)
        heapq.heappush(self.events, (now + self.costs.transfer_s, 0, WEIGHTS))


def simulate(
    costs: Costs,
    engines: SimulatedEngines,
    schedule: SimulatedSchedule,
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
    updates_s = train_s + len(counted) * costs.transfer_s
    paused_s = engines.n_replicas * updates_s if run.shared else 0.0
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
