"""The rollout engine with a clock in place of devices: its schedulers, and the times of a plan."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.config.keys import RolloutConfig
from jaxrl.engine.api import EngineStats, Generated, Request
from jaxrl.engine.device.batches import DispatchShapes, exit_size
from jaxrl.engine.pages import PagePool
from jaxrl.engine.replicas import ReplicaScheduler
from jaxrl.engine.scheduler import DispatchPlan, Scheduler
from jaxrl.engine.sequence import Sequence as RunningSequence
from jaxrl.types import Tree

NO_LOGP = np.empty(0, np.float32)


@dataclasses.dataclass(frozen=True)
class ReplicaUsage:
    """Seconds that one decode step of a replica takes of a resource (compute, HBM, links)."""

    fixed_s: int | float = 0.0
    per_sequence_s: int | float = 0.0
    per_key_s: int | float = 0.0  # of each key that a sequence attends to


@dataclasses.dataclass(frozen=True)
class EngineCosts:
    """Times of the engine's programs. Resources overlap: the slowest one bounds a dispatch."""

    decode: tuple[ReplicaUsage, ...]
    prefill_s: float  # per token, of a replica


class SimulatedEngine:
    """Implements `RequestEngine`: every request samples `max_tokens` tokens, in the plan's time.

    A token in here stands for `unit` tokens of the run, so that long responses take few dispatches.
    All replicas dispatch together, as in the run.
    """

    def __init__(
        self,
        costs: EngineCosts,
        rollout: RolloutConfig,
        shapes: DispatchShapes,
        *,
        n_replicas: int,
        n_pages: int,
        prompt_len: int,
        response_len: int,
        unit: int = 1,
    ):
        """`n_pages` of a replica, `prompt_len`, and `response_len`, the longest, are the run's."""
        self.costs, self.unit, self.n_replicas = costs, unit, n_replicas
        self.prompt_len = 1 + round((prompt_len - 1) / unit)
        self._more_keys = prompt_len - self.prompt_len * unit
        self._buckets = shapes.decode_buckets
        page_len = max(round(rollout.page_len / unit), 1)
        rows = max(shapes.prefill_row_len // (unit * page_len), 1)
        budget = shapes.prefill_row_len * shapes.prefill_buckets[-1] // unit
        self.scheduler = ReplicaScheduler(
            [
                Scheduler(
                    PagePool(
                        n_pages * rollout.page_len // (unit * page_len),
                        page_len,
                        keep=rollout.prefix_cache,
                    ),
                    max_num_seqs=rollout.max_num_seqs,
                    steps_per_dispatch=max(rollout.steps_per_dispatch // unit, 1),
                    max_len=self.prompt_len + self.n_units(response_len),
                    row_len=rows * page_len,
                    rows_per_dispatch=max(budget // (rows * page_len), 1),
                )
                for _ in range(n_replicas)
            ]
        )
        self.seconds = 0.0
        self.busy_s = 0.0  # sum over the replicas, while they have something to decode
        self._stats = EngineStats()

    def n_units(self, n_tokens: int) -> int:
        """Tokens in here of a response of the run."""
        return max(round(n_tokens / self.unit), 1)

    # Verbs of api.RequestEngine

    def set_version(self, version: int) -> None:
        self.scheduler.set_version(version)

    def submit(self, request: Request) -> int:
        return self.scheduler.submit(request)

    def free(self, slot: int) -> None:
        self.scheduler.free(slot)

    @property
    def n_unfinished(self) -> int:
        return self.scheduler.n_unfinished

    def take_stats(self) -> EngineStats:
        stats, self._stats = self._stats, EngineStats()
        return stats

    def generate(self, params: Tree) -> list[Generated]:
        plans = self.scheduler.plan()
        full = any(plan.full for plan in plans)
        running = [plan.previously_running if full else plan.decode for plan in plans]
        self._prefill(plans)
        if not any(running):
            return []
        n_steps = 1 if full else min(plan.n_steps for plan in plans if plan.decode)
        if n_steps > 1:
            n_steps = min(n_steps, self._steps_until_exit(running))
        self._decode(running, n_steps)
        return [
            self._advance(replica, seq, n_steps)
            for replica, seqs in enumerate(running)
            for seq in seqs
        ]

    def _prefill(self, plans: Sequence[DispatchPlan]) -> None:
        n_tokens = [self.unit * sum(len(chunk.tokens) for chunk in p.prefill.chunks) for p in plans]
        self._stats.n_prefill_tokens += sum(n_tokens)
        self.seconds += max(n_tokens) * self.costs.prefill_s
        self.busy_s += sum(n_tokens) * self.costs.prefill_s

    def _steps_until_exit(self, running: Sequence[Sequence[RunningSequence]]) -> int:
        """Decode steps until the compiled loop would exit."""
        exit_at = exit_size(max(map(len, running)), self._buckets, self.scheduler.n_waiting)
        left = [sorted((seq.remaining for seq in seqs), reverse=True) for seqs in running]
        return max(seqs[exit_at] for seqs in left if len(seqs) > exit_at)

    def _decode(self, running: Sequence[Sequence[RunningSequence]], n_steps: int) -> None:
        """Spends the time of a dispatch: its slowest replica's time."""
        times, own_steps = [0.0], 0
        for seqs in (seqs for seqs in running if seqs):
            n_new = [self.unit * min(seq.remaining, n_steps) for seq in seqs]
            keys = sum(
                n * (seq.n_tokens * self.unit + self._more_keys + (n - 1) / 2)
                for seq, n in zip(seqs, n_new, strict=True)
            )
            own_steps += max(n_new)
            times += [
                max(n_new) * use.fixed_s + sum(n_new) * use.per_sequence_s + keys * use.per_key_s
                for use in self.costs.decode
            ]
        self._stats.n_steps += self.unit * n_steps
        self.seconds += max(times)
        self.busy_s += max(times) * own_steps / (self.unit * n_steps)

    def _advance(self, replica: int, seq: RunningSequence, n_steps: int) -> Generated:
        n, request = min(seq.remaining, n_steps), seq.request
        # Distinct from the tokens of other responses, whose KV it must not share.
        tokens = np.full(n, request.prompt_id << 12 | request.sample, np.int32)
        finish = "length" if n == seq.remaining else ""
        slot = self.scheduler.advance(replica, seq, tokens, finish)
        return Generated(slot, tokens, NO_LOGP, NO_LOGP, finish, version=self.scheduler.version)
