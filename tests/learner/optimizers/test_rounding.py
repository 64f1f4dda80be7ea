"""Stochastic rounding: against its definition, and in updates without master weights."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.optimizers.rounding import round_stochastically, round_tree
from jaxrl.learner.state import abstract_state, apply_gradients, init_state
from jaxrl.models.decoder import decoder_specs
from sharding import bytes_per_device, make_mesh
from sharding.rules import TRAIN
from tests.learner.tiny_policy import MODEL, new_params, run_config

NO = jnp.zeros((), bool)
KEY = jax.random.key(3)


def by_definition(x: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Away from zero where noise / 2^16 reaches the distance to the neighbour above, in float64."""
    bits = x.view(np.uint32)
    below = (bits & 0xFFFF0000).view(np.float32).astype(np.float64)
    above = ((bits & 0xFFFF0000) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    share = (x.astype(np.float64) - below) / (above - below)
    return np.where(share + noise / 2.0**16 >= 1, above, below)


def test_the_result_is_that_of_the_definition(one_device):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4000) * 10.0 ** rng.integers(-30, 30, 4000)).astype(np.float32)
    noise = np.asarray(jax.random.bits(KEY, x.shape, jnp.uint16))
    got = np.asarray(round_stochastically(KEY, jnp.asarray(x)), np.float64)
    np.testing.assert_array_equal(got, by_definition(x, noise))


def test_the_mean_is_the_number_itself(one_device):
    # 1 + 2^-7 is the bfloat16 after 1; 20,000 draws of 1 + 0.3 * 2^-7 are up in 30 % +- 0.33 %.
    x = jnp.full(20_000, 1 + 0.3 * 2**-7)
    got = np.asarray(round_stochastically(KEY, x), np.float64)
    assert set(got) == {1.0, 1 + 2**-7}
    assert (got > 1).mean() == pytest.approx(0.3, abs=0.015)


def test_numbers_without_a_remainder_and_special_values_stay(one_device):
    x = jnp.array([0.0, -0.0, 1.0, -3.5, 2.0**-120, jnp.inf, -jnp.inf, jnp.nan])
    got = round_stochastically(KEY, jnp.tile(x, 50))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.tile(np.asarray(x), 50))


def test_bits_follow_from_step_and_path_and_not_from_the_mesh():
    tree = {"a": np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8), "b": np.ones(3, np.float32)}
    tree["c"] = tree["a"]
    like = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), tree) | {"b": jnp.zeros(3)}
    found = {}
    for sizes in ({}, dict(fsdp=2, tensor=4)):
        mesh = make_mesh(**sizes)
        with jax.set_mesh(mesh):
            spec = jax.sharding.NamedSharding(mesh, jax.P("fsdp", "tensor"))
            placed = {k: jax.device_put(x, spec) if k != "b" else x for k, x in tree.items()}
            for step in (4, 5):
                rounded = jax.jit(round_tree)(placed, like, jnp.int32(step))
                found[len(sizes), step] = jax.device_get(rounded)
    jax.tree.map(np.testing.assert_array_equal, found[0, 4], found[2, 4])
    assert (found[0, 4]["a"] != found[0, 5]["a"]).any()  # another step
    assert (found[0, 4]["a"] != found[0, 4]["c"]).any()  # another path
    assert found[0, 4]["b"].dtype == np.float32
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 4), zlib.crc32(b"['a']"))
    with jax.set_mesh(make_mesh()):
        by_hand = round_stochastically(key, jnp.asarray(tree["a"]))
    np.testing.assert_array_equal(by_hand, found[0, 4]["a"])


@pytest.mark.thorough
def test_steps_too_small_for_bfloat16_accumulate_without_master_weights(one_device):
    learner = dict(optimizer="sgd", lr=1e-4, clip_norm=0.0, weight_decay=0.0, master_weights=False)
    optimizer = make_optimizer(run_config(learner).learner, 10, decoder_specs(MODEL))
    state = init_state(new_params(jnp.bfloat16), optimizer)
    assert not jax.tree.leaves(state.opt_state.master)
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), state.params)
    step = jax.jit(lambda state: apply_gradients(state, grads, optimizer, keep=NO))
    for _ in range(40):
        state = step(state)
    weights = np.concatenate(
        [np.asarray(layer.mlp_norm.w, np.float32) for layer in state.params.layers]
        + [np.asarray(state.params.norm.w, np.float32)]
    )
    # Each of 40 steps of 1e-4 from 1 is a step to 1 - 2^-8 with probability 0.0256: on average the
    # weights fall by 0.004, with a standard deviation of 2^-8 * sqrt(40 * 0.0256) / sqrt(32).
    assert set(np.unique(weights)) <= {1.0 - n * 2**-8 for n in range(8)}
    assert weights.mean() == pytest.approx(1 - 0.004, abs=4 * 7e-4)


def test_the_state_is_four_bytes_per_parameter_smaller(one_device):
    specs, mesh = decoder_specs(MODEL), jax.sharding.get_mesh()
    sizes = []
    for master in (True, False):
        cfg = run_config(dict(master_weights=master))
        optimizer = make_optimizer(cfg.learner, 10, specs)
        state = abstract_state(specs, jnp.dtype(jnp.bfloat16), optimizer, TRAIN, mesh)
        sizes.append(bytes_per_device(state.opt_state))
        n_bytes = bytes_per_device(state.params)
    assert sizes[0] - sizes[1] == 2 * n_bytes
