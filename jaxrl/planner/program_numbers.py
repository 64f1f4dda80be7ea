"""The numbers of one call of a compiled program, as `python -m jaxrl.plan --json` prints them."""

from collections.abc import Mapping
from typing import Any

from jaxrl.planner.calibration import calibrated_seconds, factors_of
from jaxrl.planner.call_times import compiler_seconds, resource_seconds, serial
from jaxrl.planner.chips import Chip
from jaxrl.planner.compilation import Program
from jaxrl.planner.compiled.timeline import kernel_times


def program_numbers(name: str, program: Program, chip: Chip) -> dict[str, Any]:
    """The numbers of one call of a program."""
    found = {
        "argument_bytes": program.argument_bytes,
        "temp_bytes": program.temp_bytes,
        "output_bytes": program.output_bytes,
        "flops": program.cost.total_flops,
        "bytes_accessed": program.cost.bytes_accessed,
        "l2_bytes": program.cost.l2_bytes,
        "kernels_s": serial(program, chip).kernels_s,
        "kernels": kernel_times(program.cost.steps, chip),
        "collectives": _collectives(program, chip),
        "seconds": resource_seconds(program, chip),
        "compile_s": round(program.compile_s, 2),
    }
    factors = factors_of(chip)
    calibrated_s = calibrated_seconds(name, found, factors) if factors else 0.0
    return found | present(
        {"compiler_s": compiler_seconds(program, chip), "calibrated_s": calibrated_s}
    )


def present(times: Mapping[str, float]) -> dict[str, float]:
    """The times that are known."""
    return {name: seconds for name, seconds in times.items() if seconds}


def _collectives(program: Program, chip: Chip) -> dict[str, dict[str, int | float]]:
    """{kind: {"count", "bytes", "seconds", "exposed_s"}} of one call."""
    found = serial(program, chip)
    return {
        kind: one
        | {
            "seconds": found.collectives_s.get(kind, 0.0),
            "exposed_s": found.exposed_s.get(kind, 0.0),
        }
        for kind, one in program.cost.collectives_by_kind().items()
    }
