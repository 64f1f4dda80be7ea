"""An optimizer step with offloaded state equals the step without offloading, up to rounding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config.keys import CheckpointConfig
from jaxrl.learner.optimizers import slices
from jaxrl.learner.state import abstract_state, checkpoint_state, init_state
from jaxrl.models.config import LoRA
from jaxrl.models.decoder import decoder_specs
from sharding import (
    TRAIN,
    bytes_per_device,
    check_host_memory,
    host_bytes_per_device,
    make_mesh,
    to_device,
    to_host,
)
from sharding.tree import HOST_MEMORY_KIND
from tests.learner.tiny_policy import MODEL, batches, new_params, programs, rollouts, run_config
from tests.marks import graded
from tests.models.resized import resized

CFG = run_config(old_logp="rollout")
BATCHES = batches(rollouts(), row_len=32, token_budget=64, n_ranks=4)
MESH = dict(fsdp=4)
STACKED = resized(MODEL, L=2, stacked=True)
ADAPTERS = dataclasses.replace(STACKED, lora=LoRA(rank=4, alpha=8.0))


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def stepped(offload: bool, n_steps: int = 2, cfg=CFG, model=MODEL):
    """(state, metrics of each step, number of programs compiled after step 1).

    Parameters are bfloat16, with master weights.
    """
    optimizer, update, _ = programs(cfg, model)
    state = init_state(new_params(jnp.bfloat16, model), optimizer, offload=offload)
    metrics, compiled = [], []
    for _ in range(n_steps):
        state, found = update.update(state, BATCHES * 2)
        metrics.append(found)
        compiled.append(update.n_compiled)
    return state, metrics, compiled[-1] - compiled[0]


@pytest.mark.thorough
def test_an_offloaded_optimizer_takes_the_same_steps():
    with jax.set_mesh(make_mesh(**MESH)):
        state, metrics, n_more = stepped(offload=True)
        want, want_metrics, _ = stepped(offload=False)
    assert kinds(state.opt_state) == {HOST_MEMORY_KIND} and kinds(state.params) == {"device"}
    assert n_more == 0
    assert_same_steps((state, metrics), (want, want_metrics))


def assert_same_steps(got, want):
    """(state, metrics) equal up to the rounding of other programs.

    Where multiplications and additions fuse depends on the CPU.
    """
    for found, expected in zip(got[1], want[1], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)

    def close(a, b):
        rtol = 1e-2 if a.dtype == jnp.bfloat16 else 2e-5
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=1e-7)

    jax.tree.map(close, jax.device_get(got[0]), jax.device_get(want[0]))


# (model, keys of the learner) that gradients are summed in host memory with
SUMMED = {
    "list": (MODEL, dict(offload=("gradients",))),
    "stacked": (STACKED, dict(offload=("gradients", "optimizer"))),
    "zero": (STACKED, dict(offload=("gradients", "optimizer"), zero=2)),
    "optax": (STACKED, dict(offload=("gradients",), optimizer="optax:adabelief")),
    "adapters": (ADAPTERS, dict(offload=("gradients", "optimizer"))),
}


@pytest.mark.parametrize("case", graded(SUMMED, thorough=("list", "stacked")))
def test_gradients_summed_in_host_memory_give_the_same_steps(case, monkeypatch):
    """Tensors in slices of 512 bytes, added to over two micro-batches.

    An optimizer by import path reads all sums at once.
    """
    monkeypatch.setattr(slices, "SLICE_BYTES", 512)
    model, learner = SUMMED[case]
    cfg, plain = (
        run_config(keys, old_logp="rollout") for keys in (learner, learner | dict(offload=()))
    )
    sizes = dict(replica=2, fsdp=2) if "zero" in learner else MESH
    with jax.set_mesh(make_mesh(**sizes)):
        state, metrics, n_more = stepped("optimizer" in learner["offload"], cfg=cfg, model=model)
        want = stepped(False, cfg=plain, model=model)
    assert n_more == 0 and kinds(state.params) == {"device"}
    assert_same_steps((state, metrics), want[:2])


@pytest.mark.thorough
def test_sums_of_gradients_stay_in_host_memory():
    """In both the sums that a micro-batch is added to and the abstract ones of the planner."""
    cfg = run_config(dict(offload=("gradients",)), old_logp="rollout")
    with jax.set_mesh(make_mesh(**MESH)):
        params = new_params(jnp.bfloat16)
        update = programs(cfg)[1]
        total = update.zeros(params)
        abstract = update.abstract_zeros(params)
        added = update.accumulate(params, None, total, update.put(BATCHES[0]))
    for found in (total, abstract, added):
        assert kinds(found.grads) == {HOST_MEMORY_KIND}
        assert bytes_per_device(found.grads) == 0
    assert host_bytes_per_device(abstract.grads) == host_bytes_per_device(added.grads)
    grads = jax.tree.leaves(jax.device_get(added.grads))
    squares = sum(np.square(g, dtype=np.float64).sum() for g in grads)
    np.testing.assert_allclose(added.squares, squares, rtol=1e-5)


def test_an_offloaded_optimizer_uses_no_device_memory_between_steps():
    mesh, optimizer = make_mesh(**MESH), programs(CFG)[0]
    with jax.set_mesh(mesh):
        real = init_state(new_params(jnp.bfloat16), optimizer, offload=True)
        specs, dtype = decoder_specs(MODEL), jnp.dtype("bfloat16")
        abstract = abstract_state(specs, dtype, optimizer, TRAIN, mesh, offload=True)

    def same(a, b):
        assert (a.shape, a.dtype, a.sharding.memory_kind) == (
            b.shape,
            b.dtype,
            b.sharding.memory_kind,
        )
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)

    jax.tree.map(same, abstract, real)
    assert bytes_per_device(real.opt_state) <= 8  # counters


@pytest.mark.thorough
@pytest.mark.parametrize("offload", [True, False])
def test_a_checkpoint_is_restored_to_the_memory_that_the_run_configures(offload, tmp_path):
    mesh, optimizer = make_mesh(**MESH), programs(CFG)[0]
    with jax.set_mesh(mesh):
        state = checkpoint_state(stepped(offload=True, n_steps=1)[0])
        checkpoints = Checkpointer(tmp_path, CheckpointConfig())
        checkpoints.save(1, state, {})
        checkpoints.wait()
        abstract = abstract_state(
            decoder_specs(MODEL), jnp.dtype("bfloat16"), optimizer, TRAIN, mesh, offload=offload
        )
        restored, _ = checkpoints.restore(abstract)
        checkpoints.close()
    assert kinds(restored.opt_state) == {HOST_MEMORY_KIND if offload else "device"}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))


def test_a_tree_survives_the_round_trip_to_host_memory():
    with jax.set_mesh(make_mesh(**MESH)):
        params = new_params()
        on_host = to_host(params)
        again = to_device(on_host)
    assert kinds(on_host) == {HOST_MEMORY_KIND} and kinds(again) == {"device"}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(params))
    assert [a.sharding for a in jax.tree.leaves(again)] == [
        a.sharding for a in jax.tree.leaves(params)
    ]


def test_devices_without_host_memory_are_an_error(monkeypatch):
    class Memory:
        kind = "device"

    class Device:
        device_kind = "abacus"

        def addressable_memories(self):
            return [Memory()]

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(
        ValueError, match=r"config.learner.remat='offload' needs .* abacus has device"
    ):
        check_host_memory("config.learner.remat='offload'")
