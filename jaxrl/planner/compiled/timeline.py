"""The work of a compiled program in its scheduled order, and what it takes one after the other.

The ideal time of a program (planner/call_times.py) takes the maximum of computing, memory traffic
and collectives, as if all of them overlapped. This module gives the other end: every kernel waits
for the one before it, and a collective is covered only by the kernels that the compiler scheduled
between its start and its end.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jaxrl.planner.chips import Chip
from jaxrl.planner.compiled.hlo import HloShape


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of a program."""

    kind: str
    bytes: float  # per device: the result of an all-gather, else the operands
    n_devices: int  # per replica group
    spread: int  # distance between the first and the last device of the group
    times: float  # executions in one call of the program
    shapes: tuple[HloShape, ...]  # of the result
    op_name: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel, or one product of the matrix library."""

    flops: Mapping[str, float]  # of matrix products, by operand dtype
    bytes: float  # of HBM
    cycles: float = 0.0  # by the TPU compiler's own estimate; 0 if it has none
    attention: bool = False  # attention of training, or of a whole prompt

    def seconds(self, chip: Chip) -> float:
        """The larger of its arithmetic and its memory traffic at peak rates."""
        compute = sum((flops / chip.rate(dtype) for dtype, flops in self.flops.items()), 0.0)
        return max(compute, self.bytes / chip.memory_bytes_per_s)

    def compiler_seconds(self, chip: Chip) -> float:
        """The compiler's estimate, or `seconds` if it has none."""
        return self.cycles / chip.clock_hz if self.cycles and chip.clock_hz else self.seconds(chip)

    def bound(self, chip: Chip) -> str:
        """The row of the factor table (planner/calibration.py) that its time belongs to."""
        if self.cycles and chip.clock_hz:
            return "estimated"
        if self.attention:
            return "attention"
        in_memory = self.seconds(chip) <= self.bytes / chip.memory_bytes_per_s
        return "memory" if in_memory else "products"


@dataclasses.dataclass(frozen=True)
class HloStart:
    """A collective begins; `name` identifies its end."""

    name: str
    collective: Collective


@dataclasses.dataclass(frozen=True)
class HloDone:
    """The end of a collective: later steps need the result of the one with this name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """Steps that run `trips` times."""

    trips: float
    steps: "Sequence[HloStep]"


HloStep = Kernel | HloStart | HloDone | Loop


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call of a program with kernels one after the other."""

    kernels_s: float
    collectives_s: Mapping[str, float]  # by kind
    exposed_s: Mapping[str, float]  # of these, not covered by kernels

    @property
    def total_s(self) -> float:
        return self.kernels_s + sum(self.exposed_s.values())

    def covered(self, kind: str) -> float:
        """The share of a kind's time between its start and its end in which kernels run."""
        total = self.collectives_s.get(kind, 0.0)
        return max(1.0 - self.exposed_s[kind] / total, 0.0) if total else 0.0


def kernel_times(steps: Sequence[HloStep], chip: Chip) -> dict[str, float]:
    """Seconds of the kernels of one call by `Kernel.bound`, and their number ("count").

    At peak rates, or by the compiler's estimate where it has one.
    """
    totals: dict[str, float] = {}
    for step in steps:
        if isinstance(step, Loop):
            for name, value in kernel_times(step.steps, chip).items():
                _add(totals, name, step.trips * value)
        elif isinstance(step, Kernel):
            _add(totals, step.bound(chip), step.compiler_seconds(chip))
            _add(totals, "count", 1.0)
    return totals


def collective_seconds(one: Collective, chip: Chip) -> float:
    """Time of all executions of a collective on a ring of n devices.

    Each device sends (n - 1) / n of the data, twice for an all-reduce.
    """
    crosses = chip.node and one.spread >= chip.node
    rate = chip.network_bytes_per_s if crosses else chip.link_bytes_per_s
    if one.kind == "collective-permute":
        return one.times * one.bytes / rate
    rounds = 2 if one.kind == "all-reduce" else 1
    return one.times * rounds * one.bytes * (one.n_devices - 1) / one.n_devices / rate


def times(
    steps: Sequence[HloStep],
    chip: Chip,
    kernel_seconds: Callable[[Kernel, Chip], float] = Kernel.seconds,
) -> Times:
    """The times of a program's steps; collectives share one link and queue for it."""
    clock = _Clock(chip, kernel_seconds)
    kernels_s = clock.run(steps, 1.0)
    return Times(kernels_s, clock.collectives_s, clock.exposed_s)


class _Clock:
    """Simulates the kernels and the link of one device. A loop is simulated once."""

    def __init__(self, chip: Chip, kernel_seconds: Callable[[Kernel, Chip], float]):
        self.chip, self.kernel_seconds = chip, kernel_seconds
        self.collectives_s: dict[str, float] = {}
        self.exposed_s: dict[str, float] = {}

    def run(self, steps: Sequence[HloStep], executions: float) -> float:
        """Seconds of the kernels in one execution of the steps, without waits."""
        now = kernels_s = link_free = 0.0
        running: dict[str, tuple[str, float, float]] = {}  # (kind, start, end) on the link
        for step in steps:
            if isinstance(step, Kernel):
                seconds = self.kernel_seconds(step, self.chip)
            elif isinstance(step, Loop):
                seconds = step.trips * self.run(step.steps, executions * step.trips)
            elif isinstance(step, HloStart):
                kind = step.collective.kind
                once = dataclasses.replace(step.collective, times=1.0)
                takes = collective_seconds(once, self.chip)
                start = max(now, link_free)
                link_free = start + takes
                running[step.name] = kind, start, link_free
                _add(self.collectives_s, kind, executions * takes)
                _add(self.exposed_s, kind, 0.0)
                continue
            else:
                if step.name in running:
                    end = running[step.name][2]
                    for kind, start, stop in running.values():
                        waited = min(stop, end) - max(start, now)
                        _add(self.exposed_s, kind, executions * max(waited, 0.0))
                    del running[step.name]
                    now = max(now, end)
                continue
            now, kernels_s = now + seconds, kernels_s + seconds
        return kernels_s


def _add(totals: dict[str, float], name: str, value: float) -> None:
    totals[name] = totals.get(name, 0.0) + value
