"""The correction of a router: no gradient, and its update without a loss.

Tests of jaxrl/learner/router.py and jaxrl/models/layers/router.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.learner.router import check_correction, correction_places, moved_corrections
from jaxrl.models.config import LoRA, MLPConfig, RouterConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.layers.router import RouterLoad, choose_experts, route
from jaxrl.models.lora import checkpoint_part, split
from tests.learner.tiny_policy import MOE, batches, host_params, rollouts, run_config, update_once
from tests.marks import graded

RATE = 0.01
ROUTER = RouterConfig(2, "sigmoid", correction=True, n_groups=2, top_groups=1, scale=1.5)
MIXTURE = dataclasses.replace(
    MOE.layers[0],
    ffn=dataclasses.replace(
        MOE.expert_layers[0], router=ROUTER, shared_gate=False, names="glm4_moe"
    ),
)
DENSE = dataclasses.replace(MIXTURE, ffn=MLPConfig(32))
STACKED = dataclasses.replace(MOE, family="glm4_moe", layers=(DENSE, MIXTURE, MIXTURE))
LISTED = dataclasses.replace(STACKED, stacked=False)
ROLLOUTS = rollouts()
ONE = dict(row_len=32, token_budget=512)


def update(layout: dict, mesh: dict, *, rate: float):
    cfg = run_config(learner=dict(router_bias_rate=rate), old_logp="rollout")
    return update_once(cfg, batches(ROLLOUTS, **layout), mesh, model=LISTED)


def corrections(params) -> list[np.ndarray]:
    places = correction_places(params.cfg)
    return [np.asarray(jax.tree.leaves(params)[i]) for i in places]


def test_the_correction_selects_experts_and_does_not_weight_them(one_device):
    """Logits 0, 1, 2 have the scores 0.5, 0.7311, 0.8808; a bias of 1 lifts the first one."""
    logits = jnp.array([[[0.0, 1.0, 2.0]]])
    bias = jnp.array([1.0, 0.0, 0.0])
    router = RouterConfig(2, "sigmoid", correction=True, scale=2.0)
    run = jax.jit(functools.partial(route, given=None, router=router))
    _, weights, experts, _ = run(logits, bias)
    np.testing.assert_array_equal(experts[0, 0], [0, 2])
    # 2 x 0.5 / 1.3808 and 2 x 0.8808 / 1.3808
    np.testing.assert_allclose(weights[0, 0], [0.72422, 1.27578], rtol=1e-4)
    sums = jax.jit(jax.grad(lambda b: jnp.sum(run(logits, b)[1] ** 2)))(bias)
    np.testing.assert_array_equal(sums, 0)


def test_experts_are_chosen_in_the_groups_with_the_best_two_scores(one_device):
    """Sums of the two best of each group of three: 0.9, 1.1, 1.0; two groups are eligible."""
    scores = jnp.array([[[0.9, 0.0, 0.0, 0.6, 0.5, 0.1, 0.2, 0.8, 0.1]]])
    router = RouterConfig(3, "sigmoid", n_groups=3, top_groups=2)
    choose = jax.jit(choose_experts, static_argnames="router")
    np.testing.assert_array_equal(choose(scores, None, router=router)[0, 0], [7, 3, 4])
    every = dataclasses.replace(router, top_groups=3)
    np.testing.assert_array_equal(choose(scores, None, router=every)[0, 0], [0, 7, 3])


@pytest.mark.parametrize("model", [LISTED, STACKED], ids=["list", "stacked"])
def test_corrections_are_frozen_and_part_of_checkpoints(model):
    specs = decoder_specs(model)
    names = lambda tree: {spec.hf for spec in jax.tree.leaves(tree)}  # noqa: E731
    trained, frozen = split(specs)
    found = {spec.hf: spec for spec in jax.tree.leaves(frozen)}
    assert len(found) == (1 if model.stacked else 2)
    assert all(name.endswith("mlp.gate.e_score_correction_bias") for name in found)
    assert all(spec.dtype == "float32" for spec in found.values())
    assert names(checkpoint_part(specs)) == names(trained) | names(frozen)


def test_a_step_moves_each_bias_against_the_error_of_its_load(one_device):
    """The mean count is 10 / 4 = 2.5 in the first layer and 3 in the second."""
    count = jnp.array([[5.0, 2.0, 3.0, 0.0], [3.0, 3.0, 2.0, 4.0]])
    load = RouterLoad(prob=count, count=count, n_tokens=jnp.array([5.0, 6.0]))
    for model in (LISTED, STACKED):
        rows = list(correction_places(model).values())
        start = [jnp.full((*row.shape, 4), 0.5) for row in rows]
        step = functools.partial(moved_corrections, rows=rows, rate=0.125)
        moved = jax.jit(step)(start, load)
        signs = (np.concatenate([np.reshape(b, (-1, 4)) for b in moved]) - 0.5) / 0.125
        np.testing.assert_array_equal(signs, [[-1, 1, -1, 1], [0, 0, 1, -1]])


def test_a_rate_without_a_correction_and_with_adapters_is_refused():
    check_correction(0.0, MOE)
    check_correction(RATE, STACKED)
    with pytest.raises(ValueError, match=r"router_bias_rate = 0\.01 .*this qwen3_moe model has"):
        check_correction(RATE, MOE)
    with pytest.raises(ValueError, match=r"router_bias_rate = 0\.01 changes the base model.*rank"):
        check_correction(RATE, dataclasses.replace(STACKED, lora=LoRA(4, 4.0)))


@functools.cache
def alone(rate: float):
    return update(ONE, {}, rate=rate)


LAYOUTS = {
    "two micro-batches": (dict(row_len=128, token_budget=256), {}),
    "fsdp 2, expert 2, tensor 2": (
        dict(row_len=32, token_budget=64, n_ranks=4),
        dict(fsdp=2, expert=2, tensor=2),
    ),
    "replica 2, expert 4": (
        dict(row_len=32, token_budget=64, n_ranks=8),
        dict(replica=2, expert=4),
    ),
}


@pytest.mark.parametrize("layout", graded(LAYOUTS, thorough=["fsdp 2, expert 2, tensor 2"]))
def test_an_update_with_corrections_does_not_depend_on_the_layout(layout):
    packing, mesh = LAYOUTS[layout]
    grads, metrics, params = update(packing, mesh, rate=RATE)
    want_grads, want_metrics, want = alone(RATE)
    np.testing.assert_array_equal(corrections(params), corrections(want))
    assert metrics == pytest.approx(want_metrics, rel=1e-4, abs=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (grads, want_grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_corrections_change_by_the_rate_only():
    """Weight decay, momentum and clipping leave them alone."""
    start = np.array(corrections(host_params(LISTED, 0, "float32")))
    np.testing.assert_array_equal(corrections(alone(0.0)[2]), start)
    change = corrections(alone(RATE)[2]) - start
    np.testing.assert_allclose(np.abs(change[change != 0]), RATE, rtol=1e-5)
    assert np.any(change > 0) and np.any(change < 0)
