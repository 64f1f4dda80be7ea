"""Simulates the schedules of a run for every split of its devices, and names the best."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from jaxrl.config.keys import ScheduleConfig
from jaxrl.planner.schedules.costs import RunCosts, Split
from jaxrl.planner.schedules.simulation import Outcome, simulate

STALENESS = (1, 2, 4)  # that the search tries
TOLERANCE = 0.02  # of throughput, for which a smaller staleness or fewer devices are better
SYNC = ScheduleConfig(mode="sync", max_staleness=0)


@dataclasses.dataclass(frozen=True)
class Simulated:
    """A schedule on a split of the devices, and what became of it."""

    schedule: ScheduleConfig
    split: Split
    outcome: Outcome


@dataclasses.dataclass(frozen=True)
class Simulator:
    """Simulates the run of `costs` with responses of `lengths` [groups, samples]."""

    costs: RunCosts
    lengths: np.ndarray
    on_start: Callable[[str], None] = lambda line: None  # called with a line per simulation

    def schedule(self, schedule: ScheduleConfig, split: Split | None = None) -> list[Simulated]:
        """Sync, then the schedule; async on every split, or on `split`.

        Raises ValueError if no split fits.
        """
        costs = self.costs
        splits = [costs.shared()] if schedule.mode == "partial" else []
        if schedule.mode == "async" and not (splits := [split] if split else costs.splits()):
            n = costs.n_devices
            example = costs.misfit(Split(n // 2, n - n // 2)) if n > 1 else "there is one device"
            raise ValueError(f"no split of {n} devices fits this run: {example}; use more devices")
        return [self.run(SYNC, costs.shared()), *(self.run(schedule, one) for one in splits)]

    def search(self) -> list[Simulated]:
        """Sync; then partial, and async on its best split, for each staleness."""
        shared, splits = self.costs.shared(), self.costs.splits()
        found = [self.run(SYNC, shared)]
        for staleness in STALENESS:
            found.append(self.run(ScheduleConfig(mode="partial", max_staleness=staleness), shared))
            if splits:
                found.append(self._best_split(staleness, splits))
        return found

    def _best_split(self, staleness: int, splits: list[Split]) -> Simulated:
        """The split with the most tokens per second.

        More rollout devices help until training is the bottleneck, so throughput has one peak.
        """
        schedule = ScheduleConfig(mode="async", max_staleness=staleness)

        @functools.cache
        def at(i: int) -> Simulated:
            return self.run(schedule, splits[i])

        low, high = 0, len(splits) - 1
        while low < high:
            middle = (low + high) // 2
            if at(middle).outcome.tokens_per_s < at(middle + 1).outcome.tokens_per_s:
                low = middle + 1
            else:
                high = middle
        return at(low)

    def run(self, schedule: ScheduleConfig, split: Split) -> Simulated:
        """The steady state of the schedule on the split."""
        costs, mode = self.costs, schedule.mode
        rollout = f", {split.rollout} devices of the rollout" if mode == "async" else ""
        stale = f", staleness {schedule.max_staleness}" if mode != "sync" else ""
        self.on_start(f"simulating {mode}{stale}{rollout}")
        outcome = simulate(
            costs.training(split),
            costs.engine(split, self.lengths.mean().item()),
            schedule,
            self.lengths,
            prompt_len=costs.plan["lengths"]["prompt"],
            groups_per_step=costs.cfg.data.prompts_per_step,
        )
        return Simulated(schedule, split, outcome)


def best(found: list[Simulated]) -> Simulated:
    """The one with the most tokens per second.

    Of those within 2 % of it, the one with the smallest staleness, then on the fewest devices.
    """
    limit = (1 - TOLERANCE) * max(one.outcome.tokens_per_s for one in found)
    good = [one for one in found if one.outcome.tokens_per_s >= limit]
    return min(good, key=lambda one: (one.schedule.max_staleness, -one.outcome.tokens_per_s))
