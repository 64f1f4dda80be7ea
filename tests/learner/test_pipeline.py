"""Pipeline parallelism gives the same numbers as one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.learner.step import put_batch
from jaxrl.models.files.hf_load import load_model
from jaxrl.models.files.hf_save import save_model
from jaxrl.models.packed import forward_routed
from sharding import PIPELINE, RING, TENSOR, TRAIN, ULYSSES, make_mesh
from tests.learner.tiny_policy import (
    MODEL,
    MOE,
    all_numbers,
    batches,
    new_params,
    rollouts,
    run_config,
)
from tests.models.resized import resized

# Two micro-batches of four rows of 128 tokens; each is pipelined through the stages.
BATCHES = batches(rollouts(40), row_len=128, token_budget=128, n_ranks=4)
CFG = run_config(old_logp="rollout", entropy_coef=0.01)
REMAT = run_config(dict(remat="full"), old_logp="rollout", entropy_coef=0.01)
BALANCED = run_config(dict(router_aux_coef=0.5), old_logp="rollout")
STACKED = resized(MODEL, L=2, stacked=True)
TENSOR_STAGES = TENSOR.with_stages()
DEEP = resized(STACKED, L=4, windows=(9, 0, 0, 20))


@functools.cache
def alone(model):
    return all_numbers(BALANCED if model.expert_layers else CFG, BATCHES, {}, model, TRAIN)


def by_1f1b(cfg, remat: str = "full"):
    learner = dataclasses.replace(cfg.learner, pipeline_schedule="1f1b", remat=remat)
    return dataclasses.replace(cfg, learner=learner)


def assert_same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.thorough
@pytest.mark.parametrize("cfg", [REMAT, by_1f1b(CFG)], ids=["gpipe", "1f1b"])
def test_stages_give_the_numbers_of_one_device(cfg):
    mesh = dict(stage=2, fsdp=2, tensor=2)
    assert_same(all_numbers(cfg, BATCHES, mesh, STACKED, TENSOR_STAGES), alone(STACKED))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [dict(stage=2, tensor=2), dict(stage=4), dict(stage=2, replica=2, fsdp=2)], ids=str
)
def test_any_number_of_stages_gives_the_numbers_of_one_device(mesh):
    assert_same(all_numbers(REMAT, BATCHES, mesh, DEEP, PIPELINE), alone(DEEP))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "attention"])
def test_1f1b_with_four_stages_and_windows_gives_the_numbers_of_one_device(remat):
    got = all_numbers(by_1f1b(CFG, remat), BATCHES, dict(stage=4), DEEP, PIPELINE)
    assert_same(got, alone(DEEP))


LAYOUTS = {
    "ring 2": (dict(sequence=2), RING),
    "ulysses 2, tensor 2": (
        dict(sequence=2, tensor=2),
        dataclasses.replace(ULYSSES, residual="tensor"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_1f1b_shares_rows_and_heads(layout):
    mesh, rules = LAYOUTS[layout]
    mesh = dict(stage=2) | mesh
    assert_same(
        all_numbers(by_1f1b(CFG), BATCHES, mesh, STACKED, rules.with_stages()), alone(STACKED)
    )


def test_a_model_in_stages_is_saved_and_loaded_bit_for_bit(tmp_path):
    model = resized(STACKED, L=4)
    with jax.set_mesh(make_mesh(stage=2, fsdp=2, tensor=2)):
        params = new_params(model=model, rules=PIPELINE)
        save_model(tmp_path / "model", params)
        _, again = load_model(tmp_path / "model", rules=PIPELINE, stacked=True)
        assert again.layers.mlp.up.w.sharding.spec == jax.P("stage", "tensor", "fsdp")
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.thorough
@pytest.mark.parametrize("rules", [ULYSSES, RING], ids=["ulysses", "ring"])
def test_stages_share_rows_over_a_sequence_axis(rules):
    mesh = dict(stage=2, sequence=2)
    assert_same(all_numbers(CFG, BATCHES, mesh, STACKED, rules.with_stages()), alone(STACKED))


@pytest.mark.slow
@pytest.mark.parametrize("rules", [ULYSSES, RING], ids=["ulysses", "ring"])
def test_stages_share_rows_and_heads(rules):
    """Stages, sequence and tensor parallelism on one mesh."""
    mesh = dict(stage=2, sequence=2, tensor=2)
    rules = dataclasses.replace(rules, residual="tensor").with_stages()
    assert_same(all_numbers(REMAT, BATCHES, mesh, STACKED, rules), alone(STACKED))


EXPERTS = {
    "expert 2": (dict(expert=2), TRAIN),
    "expert 2, tensor 2": (dict(expert=2, tensor=2), TENSOR),
    "expert 2, ulysses 2": (dict(expert=2, sequence=2), ULYSSES),
    "fsdp 2, ring 2": (dict(fsdp=2, sequence=2), RING),
}


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [BALANCED, by_1f1b(BALANCED)], ids=["gpipe", "1f1b"])
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_in_stages_give_the_numbers_of_one_device(layout, cfg):
    """The router's load, its loss and gradient are over the tokens of all stages' layers."""
    mesh, rules = EXPERTS[layout]
    got = all_numbers(cfg, BATCHES, dict(stage=2) | mesh, MOE, rules.with_stages())
    assert_same(got, alone(MOE))


@pytest.mark.slow
def test_the_router_load_of_stages_is_that_of_one_device():
    """Idle ticks add nothing to it."""
    batch, found = BATCHES[0], []
    for mesh, rules in (({}, TRAIN), (dict(stage=2, fsdp=2), PIPELINE)):
        with jax.set_mesh(make_mesh(None, **mesh)):
            params, b = new_params(model=MOE, rules=rules), put_batch(batch, rules)
            run = jax.jit(functools.partial(forward_routed, rules=rules, copies=b.segments % 3))
            found.append(jax.device_get(run(params, b.tokens, b.segments, b.positions)))
    (_, load), _ = found
    assert load.n_tokens.tolist() == [(batch.segments % 3).sum()] * 2
    assert_same(*found)


@pytest.mark.slow
def test_rows_that_tensor_does_not_divide_have_the_gradients_of_one_device():
    """Stages then keep the residual stream whole: 62 positions over 4 devices."""
    model = resized(STACKED, K=4)
    batch = jax.tree.map(lambda a: a[:, :62], BATCHES[0])

    def loss(params, b, rules):
        hidden, _ = forward_routed(params, b.tokens, b.segments, b.positions, rules=rules)
        return 0.05 * jnp.sum(jnp.sin(hidden) * (b.segments > 0)[..., None])

    found = []
    for mesh, rules in (({}, TRAIN), (dict(stage=2, tensor=4), TENSOR_STAGES)):
        with jax.set_mesh(make_mesh(None, **mesh)):
            params, b = new_params(model=model, rules=rules), put_batch(batch, rules)
            gradient = jax.jit(jax.value_and_grad(functools.partial(loss, rules=rules)))
            found.append(jax.device_get(gradient(params, b)))
    assert_same(*found)
