"""Pipeline parallelism gives the same numbers as one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.models.files.hf_load import load_model
from jaxrl.models.files.hf_save import save_model
from sharding import PIPELINE, RING, TRAIN, ULYSSES, make_mesh
from tests.learner.tiny_policy import MODEL, all_numbers, batches, new_params, rollouts, run_config

# Two micro-batches of four rows of 128 tokens; each is pipelined through the stages.
BATCHES = batches(rollouts(40), row_len=128, token_budget=128, n_ranks=4)
CFG = run_config(old_logp="rollout", entropy_coef=0.01)
REMAT = run_config(dict(remat="full"), old_logp="rollout", entropy_coef=0.01)
STACKED = dataclasses.replace(MODEL, L=2, stacked=True)
DEEP = dataclasses.replace(STACKED, L=4, windows=(9, 0, 0, 20))


@functools.cache
def alone(model):
    return all_numbers(CFG, BATCHES, {}, model, TRAIN)


def assert_same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.thorough
def test_stages_give_the_numbers_of_one_device():
    mesh = dict(stage=2, fsdp=2, tensor=2)
    assert_same(all_numbers(REMAT, BATCHES, mesh, STACKED, PIPELINE), alone(STACKED))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [dict(stage=2, tensor=2), dict(stage=4), dict(stage=2, replica=2, fsdp=2)], ids=str
)
def test_any_number_of_stages_gives_the_numbers_of_one_device(mesh):
    assert_same(all_numbers(REMAT, BATCHES, mesh, DEEP, PIPELINE), alone(DEEP))


def test_a_model_in_stages_is_saved_and_loaded_bit_for_bit(tmp_path):
    model = dataclasses.replace(STACKED, L=4)
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
