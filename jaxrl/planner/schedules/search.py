"""Simulates the schedules of a run for every split of its devices, and names the best."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from jaxrl.planner.schedules.costs import RunCosts, Split
from jaxrl.planner.schedules.simulation import Outcome, SimulatedSchedule, simulate

STALENESS = (1, 2, 4)  # that the search tries
TOLERANCE = 0.02  # of throughput, for which a smaller staleness or fewer devices are better


@dataclasses.dataclass(frozen=True)
class Simulated:
    """A schedule on a split of the devices, and what became of it."""

    schedule: SimulatedSchedule
    split: Split
    outcome: Outcome


def simulate_sync(costs: RunCosts, lengths: np.ndarray) -> Simulated:
    return _simulate(costs, lengths, SimulatedSchedule("sync"), costs.shared())


def simulate_partial(
    costs: RunCosts, lengths: np.ndarray, schedule: SimulatedSchedule
) -> Simulated:
    return _simulate(costs, lengths, schedule, costs.shared())


def simulate_async(
    costs: RunCosts, lengths: np.ndarray, schedule: SimulatedSchedule, split: Split | None = None
) -> list[Simulated]:
    """One for every split, or for `split`. Raises ValueError if no split fits."""
    if not (splits := [split] if split else costs.splits()):
        n = costs.n_devices
        example = costs.misfit(Split(n // 2, n - n // 2)) if n > 1 else "there is one device"
        raise ValueError(f"no split of {n} devices fits this run: {example}; use more devices")
    return [_simulate(costs, lengths, schedule, one) for one in splits]


def search_schedules(
    costs: RunCosts,
    lengths: np.ndarray,
    base: SimulatedSchedule,
    on_start: Callable[[str], None] = lambda line: None,
) -> list[Simulated]:
    """Sync; then partial, and async on its best split, for each staleness."""
    found = [simulate_sync(costs, lengths)]
    for staleness in STALENESS:
        on_start(f"simulating max_staleness={staleness}")
        schedule = dataclasses.replace(
            base, mode="partial", max_staleness=staleness, oversample=staleness + 1.0
        )
        found.append(simulate_partial(costs, lengths, schedule))
        if splits := costs.splits():
            schedule = dataclasses.replace(schedule, mode="async")
            found.append(_best_split(costs, lengths, schedule, splits))
    return found


def _best_split(
    costs: RunCosts, lengths: np.ndarray, schedule: SimulatedSchedule, splits: list[Split]
) -> Simulated:
    """The split with the most tokens per second.

    More rollout devices help until training is the bottleneck, so throughput has one peak.
    """

    @functools.cache
    def at(i: int) -> Simulated:
        return _simulate(costs, lengths, schedule, splits[i])

    low, high = 0, len(splits) - 1
    while low < high:
        middle = (low + high) // 2
        if at(middle).outcome.tokens_per_s < at(middle + 1).outcome.tokens_per_s:
            low = middle + 1
        else:
            high = middle
    return at(low)


def best(found: list[Simulated]) -> Simulated:
    """The one with the most tokens per second.

    Of those within 2 % of it, the one with the smallest staleness, then on the fewest devices.
    """
    limit = (1 - TOLERANCE) * max(one.outcome.tokens_per_s for one in found)
    good = [one for one in found if one.outcome.tokens_per_s >= limit]
    return min(good, key=lambda one: (one.schedule.max_staleness, -one.outcome.tokens_per_s))


def _simulate(
    costs: RunCosts, lengths: np.ndarray, schedule: SimulatedSchedule, split: Split
) -> Simulated:
    outcome = simulate(
        costs.costs(split),
        costs.engines(split),
        schedule,
        lengths,
        prompt_len=costs.plan["lengths"]["prompt"],
        groups_per_step=costs.cfg.data.prompts_per_step,
    )
    return Simulated(schedule, split, outcome)
