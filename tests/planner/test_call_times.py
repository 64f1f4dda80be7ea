"""Seconds of one call: jaxrl/planner/call_times.py, in plans (plan.py, report.py)."""

import dataclasses

import pytest

from jaxrl.planner.call_times import compiler_seconds, serial_seconds
from jaxrl.planner.chips import CHIPS
from jaxrl.planner.compilation import Program
from jaxrl.planner.compiled.cost import Cost
from jaxrl.planner.compiled.timeline import Kernel
from jaxrl.planner.plan import Phase, Plan
from jaxrl.planner.programs import Lengths
from jaxrl.planner.report import as_text

CHIP = dataclasses.replace(CHIPS["v6e"], flops_per_s={"f32": 1.0}, memory_bytes_per_s=10.0)


def program(*kernels: Kernel) -> Program:
    """A program that also copies 64 GB from host memory: 2 s."""
    cycles = sum(kernel.cycles for kernel in kernels)
    cost = Cost(estimated_cycles=cycles, host_bytes=64e9, steps=list(kernels))
    return Program(0, 0, 0, 0, 0, 0, cost, compile_s=0.0, counted_state=())


def plan(**times) -> Plan:
    """A plan of one program: 3 s of products, which the compiler estimates as 7 s."""
    one = program(Kernel({"f32": 3.0}, 10.0, 7 * 1.75e9))
    phase = Phase(1, True, 3.0, 3.0, "flops", 1.0, compiler_s=times["compiler_step_s"])
    return Plan(
        topology="v6e:1",
        chip=CHIP,
        mesh={},
        fits=True,
        misfit="",
        programs={"accumulate": one},
        phases={"update": phase},
        resident={},
        host_resident={},
        budget_bytes=1,
        page_bytes=0,
        kv_pages=0,
        kv_phases=(),
        max_concurrent_sequences=0,
        expected_step_s=3.0,
        tokens_per_s=1.0,
        lengths=Lengths(1, 1),
        note="",
        n_replicas=1,
        rollout_weight_bytes=0,
        **times,
    )


def test_the_compiler_estimates_the_kernels_that_it_knows():
    kernels = Kernel({"f32": 3.0}, 10.0, 7 * 1.75e9), Kernel({"f32": 5.0}, 10.0)
    assert serial_seconds(program(*kernels), CHIP) == 3.0 + 5.0 + 2.0
    assert compiler_seconds(program(*kernels), CHIP) == pytest.approx(7.0 + 5.0 + 2.0)
    assert compiler_seconds(program(kernels[1]), CHIP) == 0.0  # none that it knows
    assert compiler_seconds(program(*kernels), dataclasses.replace(CHIP, clock_hz=0.0)) == 0.0


def test_a_plan_has_the_estimate_where_there_is_one():
    estimated = plan(serial_step_s=5.0, compiler_step_s=9.0)
    text, found = as_text(estimated), estimated.json()
    assert text.count("compiler ") == 2  # a column of programs and one of phases
    assert "one after the other: 5.0 s; by the compiler's estimate: 9.0 s" in text
    assert found["compiler_step_s"] == found["phases"]["update"]["compiler_s"] == 9.0
    assert found["programs"]["accumulate"]["compiler_s"] == pytest.approx(9.0)

    without = plan(serial_step_s=5.0, compiler_step_s=0.0)
    assert "compiler" not in as_text(without) and "compiler_step_s" not in without.json()
    assert "compiler_s" not in without.json()["phases"]["update"]


def test_a_plan_prints_the_calibrated_time_of_a_step():
    calibrated = plan(serial_step_s=5.0, compiler_step_s=9.0, calibrated_step_s=11.0)
    assert as_text(calibrated).count("calibrated ") == 2  # a column of programs and one of phases
    assert "by the compiler's estimate: 9.0 s; calibrated: 11.0 s" in as_text(calibrated)
    found = calibrated.json()
    assert found["calibrated_step_s"] == 11.0 and found["n_processes"] == 1
    # 7 s by the estimate, 2 s of copies from host memory
    assert found["programs"]["accumulate"]["calibrated_s"] == pytest.approx(9.0)


def test_a_plan_may_use_what_jax_takes_of_a_gpu():
    gpu, tpu = CHIPS["h100"], CHIPS["v5p"]
    assert gpu.usable_bytes(0.85) == 0.85 * gpu.memory_bytes
    assert gpu.usable_bytes(0.95) == 0.92 * gpu.memory_bytes
    assert tpu.usable_bytes(0.95) == 0.95 * tpu.memory_bytes
