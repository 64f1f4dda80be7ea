"""ZeRO-1 and ZeRO-2 take the steps of replicas that each hold a copy of the state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config.keys import CheckpointConfig
from jaxrl.learner.optimizer import check_opt_state
from jaxrl.learner.state import abstract_state, averaged, checkpoint_state, init_state
from jaxrl.learner.step import GradSums
from jaxrl.models.decoder import decoder_specs
from sharding import TRAIN, bytes_per_device, make_mesh
from tests.learner.tiny_policy import MODEL, batches, new_params, programs, rollouts, run_config
from tests.marks import graded

BATCHES = batches(rollouts(), row_len=32, token_budget=64, n_ranks=4)
MESH = dict(replica=2, fsdp=2)
# Numbers that both replicas hold: 3 norms of D = 16 and biases of 4 + 2 + 2 heads of H = 8. Their
# state is two moments, master weights and average in float32, and two counters.
N_WHOLE = 3 * 16 + 8 * 8
WHOLE = 4 * 4 * N_WHOLE + 2 * 4


def config(level: int, **learner):
    return run_config(dict(zero=level, ema=0.9) | learner, old_logp="rollout")


@functools.cache
def stepped(level: int, offload: bool = False, **learner):
    """(state, gradient sums) on the devices, after two optimizer steps with random gradients.

    Parameters are bfloat16.
    """
    with jax.set_mesh(make_mesh(**MESH)):
        optimizer, update, _ = programs(config(level, **learner))
        state = init_state(new_params(jnp.bfloat16), optimizer, offload=offload)
        total = update.zeros(state.params)
        rng = np.random.default_rng(0)
        grads = jax.tree.map(
            lambda g: jax.device_put(rng.standard_normal(g.shape, np.float32), g.sharding),
            total.grads,
        )
        sums = dataclasses.replace(total.sums, weight=total.sums.weight + 8)
        total = GradSums(grads, sums)
        for _ in range(2):
            state, metrics = update.apply(state, total, np.float32(0))
        assert metrics["optim/grad_norm"] > 1  # clipped to 0.5
        return state, total.grads


def assert_close(got, want):
    """Equal but for the rounding of sums and of products that compilers fuse with them."""

    def compare(a, b):
        one_rounding = 2**-8 if a.dtype == jnp.bfloat16 else 1e-6
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=one_rounding, atol=1e-9)

    jax.tree.map(compare, *jax.device_get((got, want)))


@pytest.mark.thorough
def test_zero_1_takes_the_same_steps_with_half_the_optimizer_state_on_a_device():
    (state, sums), (copies, want_sums) = stepped(1), stepped(0)
    assert_close(state, copies)
    with jax.set_mesh(make_mesh(**MESH)):
        assert_close(averaged(state), averaged(copies))
    for one, other in ((state.params, copies.params), (sums, want_sums)):
        assert bytes_per_device(one) == bytes_per_device(other)
    shared, held = bytes_per_device(state.opt_state), bytes_per_device(copies.opt_state)
    assert shared == (held - WHOLE) / 2 + WHOLE


@pytest.mark.thorough
def test_zero_2_shares_the_gradients_as_well():
    (state, sums), (copies, want_sums) = stepped(2), stepped(0)
    assert_close(state, copies)
    shared, held = bytes_per_device(sums), bytes_per_device(want_sums)
    assert shared == (held - 4 * N_WHOLE) / 2 + 4 * N_WHOLE


@pytest.mark.thorough
def test_updates_of_both_levels_are_those_without():
    found = []
    for level in (0, 1, 2):
        with jax.set_mesh(make_mesh(**MESH)):
            optimizer, update, _ = programs(config(level))
            state = init_state(new_params(jnp.bfloat16), optimizer)
            state, metrics = update.update(state, BATCHES)
            found.append((jax.device_get(state), metrics))
    for state, metrics in found[1:]:
        assert_close(state, found[0][0])
        np.testing.assert_allclose(list(metrics.values()), list(found[0][1].values()), rtol=1e-5)


@pytest.mark.parametrize(
    "learner",
    graded(
        [
            dict(master_weights=False),
            dict(optimizer="muon"),
            dict(optimizer="adafactor?min_dim_size_to_factor=8"),
            dict(optimizer="lion"),
            dict(moment_dtype="bfloat16"),
            dict(moment_dtype="int8"),
        ],
        thorough=[dict(moment_dtype="int8")],
    ),
    ids=str,
)
def test_zero_works_with_every_kind_of_state(learner):
    assert_close(stepped(1, **learner)[0].params, stepped(0, **learner)[0].params)


@pytest.mark.thorough
def test_zero_works_with_offloaded_state():
    assert_close(stepped(1, offload=True)[0], stepped(0)[0])


@pytest.mark.thorough
@pytest.mark.parametrize(("saved", "restored"), [(0, 2), (2, 0)])
def test_a_checkpoint_is_restored_under_another_level(saved, restored, tmp_path):
    mesh, (state, _), (own, _) = make_mesh(**MESH), stepped(saved), stepped(restored)
    with jax.set_mesh(mesh):
        checkpoints = Checkpointer(tmp_path, CheckpointConfig())
        checkpoints.save(1, checkpoint_state(state), {})
        checkpoints.wait()
        specs, dtype = decoder_specs(MODEL), jnp.dtype("bfloat16")
        abstract = abstract_state(specs, dtype, programs(config(restored))[0], TRAIN, mesh)
        found, _ = checkpoints.restore(abstract)
        checkpoints.close()
    state, own = checkpoint_state(state), checkpoint_state(own)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((found, state)))
    jax.tree.map(lambda a, b: a.sharding == b.sharding or pytest.fail(f"{a.sharding}"), found, own)


def test_a_mesh_without_replicas_has_nothing_to_share():
    params = jax.eval_shape(lambda: jnp.zeros((4, 4)))
    with jax.set_mesh(make_mesh(fsdp=8)):
        assert programs(config(1))[0].zero.shard(params) is params


def test_replicas_that_do_not_divide_the_model_are_an_error():
    with (
        jax.set_mesh(make_mesh(replica=8)),
        pytest.raises(ValueError, match=r"mesh.fsdp x mesh.replica, which are 8 .* 12 model"),
    ):
        import dataclasses

        specs = decoder_specs(dataclasses.replace(MODEL, D=12))
        check_opt_state(config(1).learner, specs, TRAIN)
