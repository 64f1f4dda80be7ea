"""The sources of schedules with staleness: groups in flight while the weights change.

A schedule is a source of scored responses, one batch of prompts after the other. Everything else of
a step is the same for all of them. `phases.sampling.SyncSource` has none in flight.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.data.iterator import PromptOutcome
from jaxrl.engine.api import EngineStats
from jaxrl.rollout.engines import merge_metrics
from jaxrl.rollout.loop import engine_metrics
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.runtime.signals import StopFlag
from jaxrl.trainer.core import Run
from jaxrl.trainer.phases.sampling import Scored, with_model_scores
from jaxrl.trainer.schedule.engine_thread import BatchOrder, EngineThread
from jaxrl.trainer.schedule.generator import GroupGenerator
from jaxrl.types import Reward, Rollout
from sharding import hosts


class PartialSource:
    """Groups whose unfinished responses continue under new weights (mode = "partial").

    Generation and training use the same devices in turn. Rewards are computed during both. Each
    process generates its share of every batch.
    """

    def __init__(self, generator: GroupGenerator):
        self.generator = generator

    def rollout(self, run: Run, draw: int) -> "UnscoredBatch":
        core, generator, engine = run.core, self.generator, run.engines.engine
        start = time.perf_counter()
        if core.clock.saved_at == core.clock.step:
            self.release_engine()  # a run that resumes from this checkpoint has no KV either
        engine.take_stats()
        with (
            released_on_error(self),
            core.no_compile("rollout"),
            run.engines.layout.weights(core.state.params, core.clock.timed("reshard")) as params,
            core.clock.timed("gen"),
            core.session.progress.phase("rollout", total=generator.buffer.batch_size) as bar,
            core.session.stop.agreed() as check,
        ):

            def on_dispatch() -> None:
                check()
                bar.update(generator.buffer.n_ready)

            generator.begin(core.clock.step, core.clock.step)
            batch = generator.generate(params, core.clock.step, on_dispatch)
        return UnscoredBatch(batch, engine.take_stats(), time.perf_counter() - start)

    def reward(self, run: Run, rollouts: "UnscoredBatch") -> Scored:
        core, generator, batch = run.core, self.generator, rollouts.groups
        with core.clock.timed("reward"), core.session.stop.agreed() as check:
            generator.wait_for_rewards(batch, check)
        metrics = generator.take_metrics() | {"buffer/waited_s": rollouts.waited_s}
        share = Share.of(batch, rollouts.stats, rollouts.waited_s, metrics)
        return scored_shares(run, hosts.gather(share))

    def record(self, run: Run, outcomes: Sequence[PromptOutcome]) -> None:
        run.core.iterator.record(outcomes)

    def release_engine(self) -> None:
        """Frees the engine for other requests."""
        self.generator.loop.release()

    def in_flight(self) -> Callable[[], dict[str, Any]]:
        snapshot = self.generator.snapshot()
        return lambda: {"processes": hosts.gather(snapshot.json())}


class AsyncSource:
    """Groups that a thread generates on separate devices during training (mode = "async").

    Each process has such a thread, which generates its share of every batch. Only the first
    processes have a share if there are fewer rollout workers than processes.
    """

    def __init__(
        self, thread: EngineThread, stop: StopFlag, outcomes: Sequence[PromptOutcome] = ()
    ):
        """`outcomes` were recorded after the last order before the checkpoint."""
        self.thread, self.stop, self._outcomes = thread, stop, list(outcomes)
        self._version = -1  # of the weights that the thread has
        self._taken_at: float | None = None  # the end of the last wait

    def rollout(self, run: Run, draw: int) -> list["Share"]:
        core, start, buffer = run.core, time.perf_counter(), self.thread.generator.buffer
        self.stop.check()
        with (
            core.no_compile("rollout"),
            core.clock.timed("gen"),
            core.session.progress.phase("rollout", total=buffer.batch_size) as bar,
        ):
            while self.thread.n_ahead <= core.cfg.schedule.lag:
                self._order(run)
            with self.stop.agreed() as check:

                def on_wait() -> None:
                    check()
                    bar.update(buffer.n_ready)

                batch = self.thread.take(on_wait)
            end, since = time.perf_counter(), start if self._taken_at is None else self._taken_at
            self._taken_at = end
            metrics = batch.metrics | run.engines.take_metrics()
            metrics |= {
                "buffer/waited_s": end - start,
                "rollout/busy_s": batch.busy_s,
                "perf/rollout_idle_fraction": batch.idle_s / (batch.busy_s + batch.idle_s),
                "perf/training_idle_fraction": (end - start) / (end - since),
            }
            shares = hosts.gather(Share.of(batch.groups, batch.stats, batch.busy_s, metrics))
        return shares[: self.thread.generator.n_processes]

    def reward(self, run: Run, rollouts: list["Share"]) -> Scored:
        """The thread has called the functions; the reward model is left."""
        return scored_shares(run, rollouts)

    def record(self, run: Run, outcomes: Sequence[PromptOutcome]) -> None:
        """Records them with the next order, so that what is drawn does not depend on the clock."""
        self._outcomes += outcomes

    def release_engine(self) -> None:
        """Waits until the thread has done its orders, and frees the engine."""
        self.stop.check()
        with self.stop.agreed() as check:
            self.thread.hold(check)

    def in_flight(self) -> Callable[[], dict[str, Any]]:
        snapshot, outcomes = self.thread.mark(), list(self._outcomes)
        n = self.thread.generator.n_processes

        def gathered() -> dict[str, Any]:
            mine = snapshot(self.stop.check_local).json()
            return {"processes": hosts.gather(mine)[:n], "outcomes": outcomes}

        return gathered

    def _order(self, run: Run) -> None:
        """Orders one more batch, with the current weights."""
        core = run.core
        params = None
        if core.clock.step != self._version:
            with core.clock.timed("reshard"):
                params = run.engines.layout.send(core.state.params)
            self._version = core.clock.step
        fresh = (
            core.clock.saved_at == core.clock.step
        )  # a run that resumes from this checkpoint has no KV
        step = core.clock.step + self.thread.n_ahead
        outcomes, self._outcomes = self._outcomes, []
        self.thread.order(BatchOrder(step, core.clock.step, params, fresh, outcomes))


@dataclasses.dataclass(frozen=True)
class UnscoredBatch:
    """The groups of a batch whose rewards may still be computed."""

    groups: list[PromptGroup]
    stats: EngineStats
    waited_s: float


@contextlib.contextmanager
def released_on_error(source: PartialSource) -> Iterator[None]:
    """Frees the engine if the block raises."""
    try:
        yield
    except BaseException:
        source.release_engine()
        raise


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a batch that one process generated."""

    rollouts: list[Rollout]
    rewards: list[Reward]  # of its functions
    metrics: dict[str, float]

    @classmethod
    def of(
        cls,
        groups: Sequence[PromptGroup],
        stats: EngineStats,
        busy_s: float,
        metrics: dict[str, float],
    ) -> "Share":
        """The share of complete groups, whose engine ran for `busy_s`, with further metrics."""
        rollouts = [r for group in groups for r in group.rollouts or ()]
        rewards = [r for group in groups for r in group.rewards or ()]
        n_tokens = sum(len(r.tokens) for r in rollouts)
        return cls(rollouts, rewards, engine_metrics(stats, n_tokens, busy_s) | metrics)


def scored_shares(run: Run, shares: Sequence[Share]) -> Scored:
    """The rollouts of all processes with the rewards of functions and of the reward model."""
    rollouts = [r for share in shares for r in share.rollouts]
    rewards = [r for share in shares for r in share.rewards]
    metrics = merge_metrics([share.metrics for share in shares])
    scored = with_model_scores(run.reward_model, rollouts, rewards, run.core.session.stop)
    return scored, metrics | staleness_metrics(rollouts, run.core.clock.step)


def staleness_metrics(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    """Age of the responses at `step`, from the version of the first token, and their versions."""
    ages = [step - int(r.versions[0]) for r in rollouts if len(r.versions)]
    return {
        "staleness/mean": float(np.mean(ages or 0)),
        "staleness/max": float(max(ages, default=0)),
        "rollout/versions_per_response": float(
            np.mean([len(np.unique(r.versions)) for r in rollouts])
        ),
    }
