"""Runs of layers: those of equal kind are stacked, and scanned over a repeating period."""

import functools
import itertools
from collections.abc import Hashable


@functools.cache
def layer_runs(kinds: tuple[Hashable, ...]) -> tuple[tuple[range, ...], ...]:
    """Consecutive layers as runs, each a period of layers that repeats.

    A run is one range of layer indices per place in its period: layers of the kinds A B B A B B are
    the run (0, 3), (1, 4), (2, 5). Layers that do not repeat are runs of one layer each.
    """
    runs, start = [], 0
    while start < len(kinds):
        period, n = 1, 1  # of those that cover most layers, the shortest
        for p in range(1, (len(kinds) - start) // 2 + 1):
            repeats = _n_repeats(kinds[start:], p)
            if repeats > 1 and repeats * p > n * period:
                period, n = p, repeats
        stop = start + period * n
        runs.append(tuple(range(start + place, stop, period) for place in range(period)))
        start = stop
    return tuple(runs)


def _n_repeats(kinds: tuple[Hashable, ...], period: int) -> int:
    """How often the first `period` kinds follow each other from the start."""
    same = itertools.takewhile(lambda i: kinds[i] == kinds[i % period], range(len(kinds)))
    return sum(1 for _ in same) // period
