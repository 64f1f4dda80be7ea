"""Factors between the rates of a plan and what a chip reaches, and the times that follow from them.

Each factor says where it is from. "fit": chosen so that one published run is met. "measured": by a
program of this project. "assumed": from the hardware or from experience with other programs; the
first thing to measure on a device. docs/concepts/planner_accuracy.md compares the times with
published ones.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.planner.chips import CHIPS, Chip

RATES = ("products", "attention", "memory", "estimated")  # `Kernel.bound`
LOOPS = ("decode", "mixed", "judge_decode")  # a call stands for one step of a loop


@dataclasses.dataclass(frozen=True)
class Factor:
    """A share of a peak rate, or seconds."""

    value: float
    status: str  # "fit" | "measured" | "assumed"
    source: str


# CPU time of the host, on one core of a server, while the device runs the round before.
HOST = {
    "round": Factor(0.12e-3, "measured", "bench_calls.py: one call with 28 listed layers"),
    "sequence_round": Factor(7.5e-6, "measured", "bench_rounds.py: 2,048 running sequences"),
}
GPU = HOST | {
    "products": Factor(0.66, "fit", "JAX-Toolbox, Llama 2 7B on 8 H100: 0.721 s per step"),
    "attention": Factor(0.40, "assumed", "Triton kernels with seven products in place of five"),
    "memory": Factor(0.85, "assumed", "large copies on HBM"),
    "links": Factor(0.75, "assumed", "NCCL over NVLink and InfiniBand, large messages"),
    "kernel": Factor(1.2e-6, "assumed", "from one kernel of a CUDA graph to the next"),
    "collective": Factor(17e-6, "assumed", "start of an NCCL kernel, if nothing covers it"),
    "loop": Factor(30e-6, "assumed", "the host reads the condition of the decode loop"),
}
TPU = HOST | {
    "products": Factor(0.90, "assumed", "grouped products of Pallas; others have an estimate"),
    "attention": Factor(0.90, "measured", "instruction bundles of splash, v5p: 0.89 forward"),
    "memory": Factor(0.85, "assumed", "DMA of Pallas kernels; others have an estimate"),
    "estimated": Factor(1.0, "assumed", "the compiler's estimate of cycles"),
    "links": Factor(0.85, "assumed", "a ring over one axis of the torus"),
    "kernel": Factor(0.0, "assumed", "in the estimate"),
    "collective": Factor(3e-6, "assumed", "start of a collective, if nothing covers it"),
    "loop": Factor(0.0, "assumed", "the device evaluates the condition"),
}
# A matrix unit of 256 x 256 multiplies heads of 128 features on half of its width.
WIDE_TPU = TPU | {
    "attention": Factor(0.45, "assumed", "half of the matrix unit for heads of 128 features")
}
WIDE = (CHIPS["v6e"].name,)


def factors_of(chip: Chip) -> Mapping[str, Factor] | None:
    """The factors of a chip; None for CPUs, and for TPUs without a compiler's estimate."""
    if chip.clock_hz:
        return WIDE_TPU if chip.name in WIDE else TPU
    return GPU if chip.l2_bytes else None


def calibrated_seconds(
    name: str, program: Mapping[str, Any], factors: Mapping[str, Factor]
) -> float:
    """Seconds of one call of a program from its numbers in `Plan.json()`.

    Kernels run one after the other. Of a collective count the parts that no kernel covers.
    """
    kernels = program["kernels"]
    total = kernels.get("count", 0.0) * factors["kernel"].value
    total += sum(kernels[rate] / factors[rate].value for rate in RATES if rate in kernels)
    for one in program["collectives"].values():
        total += one["exposed_s"] / factors["links"].value
        if one["seconds"]:
            exposed = one["exposed_s"] / one["seconds"]
            total += exposed * one["count"] * factors["collective"].value
    total += program["seconds"]["host"]
    return total + factors["loop"].value * (name in LOOPS)


def round_seconds(n_sequences: int | float, factors: Mapping[str, Factor]) -> float:
    """Host time of a process for a dispatch of the engine with so many running sequences.

    The engine dispatches the next round before it reads the last one, so the host and the device
    overlap, and the slower one counts.
    """
    return factors["round"].value + n_sequences * factors["sequence_round"].value
