"""Tests that updates under every preset compile for TPUs and GPUs that are not attached."""

import pytest

from jaxrl.planner.compiled.cost import program_cost
from jaxrl.planner.topology import topology
from tests.test_collectives import UPDATE, compiled_update, moved

COMPILERS = {"v5e:2x4": "libtpu", "v5p:2x2x2": "libtpu", "h100:8": "jax_cuda13_plugin"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ulysses", "ring", "expert", "pipeline"])
@pytest.mark.parametrize("target", COMPILERS)
def test_an_update_compiles_for_the_target(target, name):
    pytest.importorskip(COMPILERS[target], reason=f"{target} needs {COMPILERS[target]}'s compiler")
    program = compiled_update(name, topology(target).devices, "bfloat16")
    found = moved(program_cost(program.as_text() or "", lambda loop: 1).collectives)
    # Some compilers all-reduce small gradients and slice them instead of a reduce-scatter.
    sums = {"all-reduce", "reduce-scatter"}
    assert found.keys() - sums == UPDATE[name][-1].keys() - sums
