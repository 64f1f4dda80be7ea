"""Updates of a mixture of experts and the load-balancing loss do not depend on the layout.

Tests of jaxrl/learner/router.py.
"""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.learner.step import put_batch
from jaxrl.models.packed import forward_routed
from sharding import RING, TRAIN, ULYSSES
from tests.learner.tiny_policy import (
    MOE,
    batches,
    new_params,
    new_state,
    programs,
    rollouts,
    run_config,
)
from tests.learner.tiny_policy import update_once as update_any
from tests.marks import graded

ROLLOUTS = rollouts()
ONE = dict(row_len=32, token_budget=512)
COEF = 0.5  # large, so that the load-balancing loss dominates
CFG = run_config(learner=dict(router_aux_coef=COEF), old_logp="rollout")


def update_once(packing, mesh):
    return update_any(CFG, batches(ROLLOUTS, **packing), mesh, model=MOE)


@pytest.fixture(scope="module")
def want():
    """16 rollouts in one micro-batch on one device."""
    return update_once(ONE, {})


def assert_same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


LAYOUTS = {
    "long rows, two micro-batches": (dict(row_len=128, token_budget=256), {}),
    "replica 2, expert 4": (
        dict(row_len=32, token_budget=64, n_ranks=8),
        dict(replica=2, expert=4),
    ),
    "fsdp 2, expert 2, tensor 2": (
        dict(row_len=32, token_budget=64, n_ranks=4),
        dict(fsdp=2, expert=2, tensor=2),
    ),
}
MORE = {
    "four micro-batches": (dict(row_len=32, token_budget=128), {}),
    "expert 2": (dict(row_len=32, token_budget=128, n_ranks=2), dict(expert=2)),
    "expert 4": (dict(row_len=32, token_budget=64, n_ranks=4), dict(expert=4)),
    "fsdp 8": (dict(row_len=32, token_budget=64, n_ranks=8), dict(fsdp=8)),
}
MOST = ("long rows, two micro-batches", "fsdp 2, expert 2, tensor 2")


@pytest.mark.parametrize("layout", graded((*LAYOUTS, *MORE), thorough=MOST))
def test_an_update_does_not_depend_on_the_layout(layout, want):
    packing, mesh = (LAYOUTS | MORE)[layout]
    assert_same(update_once(packing, mesh), want)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [ULYSSES, RING], ids=["ulysses", "ring"])
def test_an_update_with_sequence_parallelism_equals_that_of_one_device(rules, want):
    some = batches(ROLLOUTS, row_len=64, token_budget=64, n_ranks=4)
    mesh = dict(fsdp=2, expert=2, sequence=2)
    assert_same(update_any(CFG, some, mesh, model=MOE, rules=rules), want)


@pytest.mark.thorough
def test_the_balance_loss_is_over_all_tokens_of_the_mini_batch(want, one_device):
    """It is E Σ f P over the tokens of both layers."""
    [batch] = batches(ROLLOUTS, **ONE)
    b = put_batch(batch, TRAIN)
    params = new_params(model=MOE)
    _, load = forward_routed(params, b.tokens, b.segments, b.positions, rules=TRAIN)
    assert load is not None
    n = 2 * (batch.segments > 0).sum()
    assert load.n_tokens.sum() == n and load.count.sum() == 2 * n
    share, prob = load.count.sum(0) / n, load.prob.sum(0) / n
    np.testing.assert_allclose(prob.sum(), 1.0, rtol=1e-5)
    _, metrics, _ = want
    loss = 4 * (share * prob).sum()
    np.testing.assert_allclose(metrics["router/balance_loss"], loss, rtol=1e-5)
    total = metrics["loss/policy"] + COEF * loss
    np.testing.assert_allclose(metrics["loss/total"], total, rtol=1e-5)
    load_over_mean = load.count / load.count.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(metrics["router/load_max"], load_over_mean.max(), rtol=1e-6)
    np.testing.assert_allclose(metrics["router/load_min"], load_over_mean.min(), rtol=1e-6)


@pytest.mark.thorough
def test_the_balance_loss_falls_if_it_is_the_only_loss(one_device):
    flat = [dataclasses.replace(r, advantages=np.zeros_like(r.advantages)) for r in ROLLOUTS]
    state, (_, update, _) = new_state(CFG, model=MOE), programs(CFG, MOE, TRAIN)
    losses = []
    for _ in range(8):
        state, metrics = update.update(state, batches(flat, **ONE))
        assert metrics["loss/policy"] == 0
        losses.append(metrics["router/balance_loss"])
    n_compiled = update.n_compiled
    update.balance(state.params, batches(flat, **ONE) * 3)
    assert update.n_compiled == n_compiled  # the second and third micro-batch compile nothing
    assert losses[-1] < losses[0] - 0.01 and losses[-1] > 2.0 - 1e-3  # 2 = perfect balance


@pytest.mark.slow
def test_without_its_coefficient_the_balance_loss_is_only_logged(want):
    cfg = run_config(old_logp="rollout")
    grads, metrics, _ = update_any(cfg, batches(ROLLOUTS, **ONE), {}, model=MOE)
    assert metrics["router/balance_loss"] == pytest.approx(want[1]["router/balance_loss"])
    assert metrics["loss/total"] == metrics["loss/policy"]
    assert np.abs(grads.layers.mlp.router - want[0].layers.mlp.router).max() > 1e-4


def test_a_balance_loss_of_a_dense_model_is_an_error(one_device):
    state, (_, update, _) = new_state(CFG), programs(CFG)
    with pytest.raises(ValueError, match=r"router_aux_coef = 0\.5 balances experts, .* has none"):
        update.update(state, batches(ROLLOUTS, **ONE))
