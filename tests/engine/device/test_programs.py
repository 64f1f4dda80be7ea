"""Tests of the engine's programs: copies of pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.engine.device import programs
from jaxrl.models.kv_cache import KVCache
from jaxrl.planner.programs import run_programs
from jaxrl.planner.topology import topology
from sharding import DECODE, make_mesh
from tests.models.resized import resized
from tests.planner.tiny_run import TINY, run

L, P = 2, 6  # layers, pages


@pytest.mark.parametrize(("stacked", "platform"), [(False, "cpu"), (True, "cpu"), (True, "tpu")])
def test_pages_are_copied_in_every_layer_and_padding_changes_nothing(
    one_device, monkeypatch, stacked, platform
):
    monkeypatch.setattr(programs, "target_platform", lambda: platform)
    k, v = np.random.default_rng(0).integers(100, size=(2, L, P, 1, 4, 8))
    sources, targets = np.array([1, 1, 3, 0]), np.array([2, 5, 4, P])  # the last one is padding

    def copy(k, v):
        pools = (jnp.asarray(k), jnp.asarray(v)) if stacked else (list(k), list(v))
        how = dict(rules=DECODE, stacked=stacked, windows=(0,) * L)
        pairs = ({0: jnp.asarray(ids)} for ids in (sources, targets))
        return programs.copy_pages(KVCache(*pools), *pairs, **how)

    found = jax.jit(copy)(k, v)
    for pool in (k, v):
        pool[:, targets[:-1]] = pool[:, sources[:-1]]
    want = [k, v] if stacked else [*k, *v]
    for one, other in zip(jax.tree.leaves(found), want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.thorough
def test_a_copy_of_pages_of_stacked_layers_needs_no_second_pool_on_tpu():
    pytest.importorskip("libtpu")
    machine = topology("v5p:2x2x2")
    model = resized(TINY, L=4, K=1, N=1, H=256, stacked=True)
    with jax.set_mesh(make_mesh(machine.devices, fsdp=8)):
        planned = run_programs(
            run(mesh__fsdp=8, mesh__tensor=1, model__dtype="bfloat16"),
            model,
            machine.chip.memory_bytes,
        )
        lowered = planned.table["copy_pages"].lower()
        compiled = lowered.compile(dict(machine.compiler_options))
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes / 20
