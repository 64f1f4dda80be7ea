"""Master weights, moving averages and the abstract train state."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.state import (
    abstract_state,
    apply_gradients,
    averaged,
    init_state,
)
from jaxrl.models.decoder import decoder_specs
from sharding import copy_tree, make_mesh
from sharding.rules import TRAIN
from tests.learner.tiny_policy import MODEL, new_params, run_config
from tests.models.resized import resized

NO = jnp.zeros((), bool)


def optimizer_of(**learner):
    cfg = run_config(learner=learner)
    return make_optimizer(cfg.learner, 10, decoder_specs(MODEL))


def test_steps_too_small_for_bfloat16_accumulate_in_the_master_weights(one_device):
    optimizer = optimizer_of(optimizer="sgd", lr=1e-4, clip_norm=0.0)
    state = init_state(new_params(jnp.bfloat16), optimizer)
    start = np.asarray(
        state.params.norm.w, np.float32
    )  # ones; the next bfloat16 below is 1 - 2^-8 = 0.996
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), state.params)
    step = jax.jit(lambda state: apply_gradients(state, grads, optimizer, keep=NO))
    one = step(state)
    np.testing.assert_array_equal(np.asarray(one.params.norm.w, np.float32), start)
    for _ in range(40):
        state = step(state)
    # 40 * 1e-4 = 0.004: beyond the midpoint between 1 and 0.996
    np.testing.assert_allclose(state.opt_state.master.norm.w, start - 0.004, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(state.params.norm.w, np.float32), 1 - 2**-8)
    assert state.params.norm.w.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_average_follows_the_float32_weights(one_device, dtype):
    optimizer = optimizer_of(optimizer="sgd", lr=1e-4, clip_norm=0.0, ema=0.75)
    state = init_state(new_params(dtype), optimizer)
    weights = average = np.asarray(state.params.norm.w, np.float64)
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), state.params)
    step = jax.jit(
        lambda state, keep: apply_gradients(state, grads, optimizer, keep=keep), donate_argnums=0
    )
    for _ in range(3):
        state, weights = step(state, NO), weights - 1e-4
        average = 0.75 * average + 0.25 * weights
    np.testing.assert_allclose(state.opt_state.ema.norm.w, average, rtol=0, atol=1e-7)
    assert averaged(state).norm.w.dtype == dtype
    before = jax.device_get(state.opt_state.ema)
    kept = step(state, ~NO)
    jax.tree.map(np.testing.assert_array_equal, kept.opt_state.ema, before)


def test_float32_parameters_are_their_own_master(one_device):
    state = init_state(new_params(), optimizer_of())
    assert not jax.tree.leaves(state.opt_state.master)


def test_moments_are_float32_under_bfloat16_parameters(one_device):
    state = init_state(new_params(jnp.bfloat16), optimizer_of())
    moments = (
        optax.tree.get(state.opt_state.inner, "nu"),
        optax.tree.get(state.opt_state.inner, "mu"),
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype(jnp.float32)}


def test_a_rejected_step_keeps_every_bit(one_device):
    optimizer = optimizer_of()
    state = init_state(new_params(), optimizer)
    grads = jax.tree.map(lambda p: p * jnp.nan, state.params)
    step = jax.jit(lambda state: apply_gradients(state, grads, optimizer, keep=~NO))
    kept = jax.device_get(step(state))
    jax.tree.map(np.testing.assert_array_equal, kept, jax.device_get(state))


def test_a_copied_tree_shares_no_buffer(one_device):
    params = new_params()
    copy = copy_tree(params)
    jax.tree.map(lambda p: p.delete(), params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(copy)))


MIXED = dict(replica=2, fsdp=2, tensor=2)
STATES = [*itertools.product([{}, MIXED], ["float32", "bfloat16"], [False, True])]
DEFAULT_STATES = [({}, "float32", False), (MIXED, "bfloat16", True)]


@pytest.mark.parametrize(
    ("mesh", "dtype", "stacked"),
    [pytest.param(*x, marks=[pytest.mark.thorough] * (x not in DEFAULT_STATES)) for x in STATES],
)
def test_the_abstract_state_matches_a_real_state(mesh, dtype, stacked):
    model, dtype = resized(MODEL, L=2, stacked=stacked), jnp.dtype(dtype)
    devices = make_mesh(**mesh)
    with jax.set_mesh(devices):
        specs = decoder_specs(model)
        optimizer = make_optimizer(run_config().learner, 10, specs)
        state = init_state(new_params(dtype, model), optimizer)
        abstract = abstract_state(specs, dtype, optimizer, TRAIN, devices)

    def same(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)

    jax.tree.map(same, abstract, state)
