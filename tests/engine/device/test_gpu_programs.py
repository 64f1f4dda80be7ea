"""The engine's programs, compiled for GPUs that are not attached."""

import re

import jax
import pytest

from jaxrl.planner.programs import run_programs
from jaxrl.planner.topology import topology
from sharding import make_mesh
from tests.models.resized import resized
from tests.planner.tiny_run import TINY, run

pytest.importorskip("jax_cuda13_plugin", reason="the CUDA compiler is not installed")


MODEL = resized(TINY, F=88)  # no other array has 88 or 176 rows


@pytest.mark.thorough
def test_a_decode_step_does_not_copy_weights():
    machine, cfg = topology("h100:8"), run(mesh__fsdp=8, mesh__tensor=1)
    with jax.set_mesh(make_mesh(machine.devices, fsdp=8)):
        programs = run_programs(cfg, MODEL, machine.chip.memory_bytes)
        lowered = programs.table["decode"].lower()
        text = lowered.compile(dict(machine.compiler_options)).as_text()
    rows = {int(n) for n in re.findall(r"\w+\[(\d+),64\]", text)}
    assert 88 in rows and 176 not in rows
