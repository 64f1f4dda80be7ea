"""Seconds of one call of a compiled program: ideal, with kernels one after the other, estimated."""

from jaxrl.planner.chips import Chip
from jaxrl.planner.compilation import Program
from jaxrl.planner.compiled.timeline import Kernel, Times, collective_seconds, times


def roofline(program: Program, chip: Chip) -> tuple[float, str]:
    """(seconds of one call at peak rates, what bounds it).

    The maximum of compute, HBM traffic, collectives and host transfers, as if all overlapped.
    """
    times = resource_seconds(program, chip)
    bound = max(times, key=times.__getitem__)
    return float(times[bound]), bound


def resource_seconds(program: Program, chip: Chip) -> dict[str, float]:
    """Seconds that one call keeps each resource busy at its peak rate."""
    cost = program.cost
    return {
        "flops": float(sum(flops / chip.rate(dtype) for dtype, flops in cost.flops.items())),
        "memory": cost.bytes_accessed / chip.memory_bytes_per_s,
        "collectives": float(sum(collective_seconds(one, chip) for one in cost.collectives)),
        "host": cost.host_bytes / chip.host_bytes_per_s,
    }


def serial_seconds(program: Program, chip: Chip) -> float:
    """Seconds of one call with kernels one after the other.

    Collectives count as far as kernels do not cover them, host transfers in full.
    """
    return serial(program, chip).total_s + program.cost.host_bytes / chip.host_bytes_per_s


def compiler_seconds(program: Program, chip: Chip) -> float:
    """`serial_seconds` with the TPU compiler's estimate of kernels; 0 if it has none.

    Kernels without an estimate, above all those of Pallas, count at peak rates.
    """
    if not (program.cost.estimated_cycles and chip.clock_hz):
        return 0.0
    total_s = times(program.cost.steps, chip, Kernel.compiler_seconds).total_s
    return total_s + program.cost.host_bytes / chip.host_bytes_per_s


def serial(program: Program, chip: Chip) -> Times:
    """The times of one call with kernels one after the other."""
    return times(program.cost.steps, chip)
