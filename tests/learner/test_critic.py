"""Values, loss and gradient of separate and shared critics do not depend on packing and mesh.

Tests of jaxrl/learner/critic.py.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.config.keys import RoleConfig
from jaxrl.data.packing import gather, pack
from jaxrl.layout import Layout
from jaxrl.learner.critic import ValueScorer, make_critic, shared_value_scorer
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.state import init_state
from jaxrl.learner.step import make_update, make_value_update
from jaxrl.models.decoder import decoder_specs
from jaxrl.runtime.flat_program import unflatten
from sharding import PIPELINE, TRAIN, ULYSSES, Rules, make_mesh
from tests.learner.tiny_policy import MODEL, batches, new_params, rollouts, run_config
from tests.models.resized import resized

CRITIC = dataclasses.replace(MODEL, heads=("score",))
STAGED = resized(CRITIC, L=2, stacked=True)  # one layer for each pipeline stage
BOTH = dataclasses.replace(MODEL, heads=("vocab", "score"))
RNG = np.random.default_rng(3)


def noise(r, scale: float) -> np.ndarray:
    return (scale * RNG.standard_normal(len(r.tokens))).astype(np.float32)


ROLLOUTS = [dataclasses.replace(r, values=noise(r, 1), returns=noise(r, 2)) for r in rollouts()]
LAYOUTS = {
    "long rows in two micro-batches": (dict(row_len=128, token_budget=128), {}, TRAIN),
    "2 x 2 x 2 devices": (
        dict(row_len=32, token_budget=128, n_ranks=4),
        dict(replica=2, fsdp=2, tensor=2),
        TRAIN,
    ),
    "ulysses": (dict(row_len=32, token_budget=64, n_ranks=2), dict(fsdp=2, sequence=2), ULYSSES),
    "pipeline": (dict(row_len=32, token_budget=64, n_ranks=2), dict(fsdp=2, stage=2), PIPELINE),
}
ONE = (dict(row_len=32, token_budget=512), {}, TRAIN)


def gae_config(aggregation="seq_mean_token_mean", **critic):
    cfg = run_config(advantage="gae", aggregation=aggregation)
    return dataclasses.replace(cfg, critic=dataclasses.replace(cfg.critic, **critic))


def params_of(model, rules: Rules):
    """Parameters of `model` with a random value head instead of a zero one."""
    params = new_params(model=model, rules=rules)
    head = np.random.default_rng(5).standard_normal((1, MODEL.D)).astype(np.float32)
    head = jax.device_put(head, params.score.sharding)
    is_head = lambda path: jax.tree_util.keystr(path) == ".score"  # noqa: E731
    return jax.tree.map_with_path(lambda path, leaf: head if is_head(path) else leaf, params)


def value_numbers(packing: dict, sizes: dict, rules: Rules, model=CRITIC):
    """(values of every rollout, gradient of the loss, metrics) of a separate critic.

    Its aggregation is not the policy's.
    """
    cfg = gae_config("token_mean", value_clip=0.3)
    critic = dataclasses.replace(cfg.critic, aggregation="seq_mean_token_mean")
    cfg = dataclasses.replace(cfg, critic=critic)
    shape = packing["token_budget"] // packing["row_len"], packing["row_len"]
    packed = pack(ROLLOUTS, shapes=(shape,), align=8, n_ranks=packing.get("n_ranks", 1))
    with jax.set_mesh(make_mesh(**sizes)):
        params = params_of(model, rules)
        scorer = ValueScorer(cfg.critic_run, Layout(rules, None, None, np.dtype(np.float32)))
        found = gather(scorer.values(params, packed), packed)
        optimizer = make_optimizer(cfg.critic_run.learner, 10, decoder_specs(model))
        update = make_value_update(cfg.critic_run, optimizer, rules)
        state = init_state(params, optimizer)
        total = update.zeros(state.params)
        for one in packed:
            total = update.accumulate(state.params, None, total, update.put(one.batch))
        grads = jax.device_get(
            jax.tree.map(lambda g: g / total.sums.weight, unflatten(total.grads))
        )
        sums = jax.device_get(total.sums)
        metrics = {name: float(x / sums.weight) for name, x in sums.losses.items()}
        metrics |= {name: float(x / n) for name, (x, n) in sums.means.items()}
    return found, grads, metrics


@functools.cache
def alone(model=CRITIC):
    return value_numbers(*ONE, model)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYOUTS)
def test_packing_micro_batches_and_devices_change_neither_values_nor_their_update(name):
    model = STAGED if name == "pipeline" else CRITIC
    got, want = value_numbers(*LAYOUTS[name], model), alone(model)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * np.abs(other).max())


def test_the_loss_equals_that_of_a_slow_reference():
    values, grads, metrics = alone()
    losses, clipped = [], []
    for r, v in zip(ROLLOUTS, values, strict=True):
        limited = np.clip(v, r.values - 0.3, r.values + 0.3)
        squares = np.stack([(v - r.returns) ** 2, (limited - r.returns) ** 2])
        losses.append(0.5 * squares.max(0).mean())
        clipped.append(squares[1] > squares[0])
    np.testing.assert_allclose(metrics["critic/loss"], np.mean(losses), rtol=1e-4)
    clipped = np.concatenate(clipped)
    assert 0 < clipped.mean() < 1
    np.testing.assert_allclose(metrics["critic/clip_fraction"], clipped.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        metrics["critic/value_mean"], np.concatenate(values).mean(), rtol=1e-4
    )
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def test_a_value_belongs_to_the_state_before_its_token():
    """Another last token changes no value; another last prompt token changes all values."""
    [r] = [r for r in ROLLOUTS if len(r.tokens) == 12][:1]
    last, prompt = r.tokens.copy(), r.prompt_tokens.copy()
    last[-1], prompt[-1] = (last[-1] + 1) % MODEL.V, (prompt[-1] + 1) % MODEL.V
    others = [
        r,
        dataclasses.replace(r, tokens=last),
        dataclasses.replace(r, prompt_tokens=prompt),
    ]
    with jax.set_mesh(make_mesh()):
        scorer = ValueScorer(
            gae_config().critic_run, Layout(TRAIN, None, None, np.dtype(np.float32))
        )
        packed = pack(others, shapes=((1, 32),), align=8, n_ranks=1)
        first, same, other = gather(scorer.values(params_of(CRITIC, TRAIN), packed), packed)
    np.testing.assert_array_equal(first, same)
    assert (first != other).all()


@functools.cache
def shared_numbers_on_one_device(loss_coef: float):
    return shared_numbers(loss_coef, *ONE)


def shared_numbers(loss_coef: float, packing: dict, sizes: dict, rules: Rules):
    cfg = gae_config(shared=True, loss_coef=loss_coef, value_clip=0.3)
    with jax.set_mesh(make_mesh(**sizes)):
        params = params_of(BOTH, rules)
        optimizer = make_optimizer(cfg.learner, 10, decoder_specs(BOTH))
        update = make_update(cfg, optimizer, rules)
        total = update.zeros(params)
        for batch in batches(ROLLOUTS, **packing):
            total = update.accumulate(params, None, total, update.put(batch))
        grads = jax.device_get(
            jax.tree.map(lambda g: g / total.sums.weight, unflatten(total.grads))
        )
        losses = {name: float(x / total.sums.weight) for name, x in total.sums.losses.items()}
    return grads, losses


@pytest.mark.thorough
def test_a_shared_critic_adds_its_loss_and_gradient_to_those_of_the_policy():
    grads, losses = shared_numbers_on_one_device(0.25)
    np.testing.assert_allclose(
        losses["loss/total"], losses["loss/policy"] + 0.25 * losses["critic/loss"], rtol=1e-5
    )
    twice, _ = shared_numbers(0.5, *ONE)
    # 2 (p + v/4) - (p + v/2) = p: the policy's gradient, which is zero in the value head
    np.testing.assert_allclose(2 * grads.score, twice.score, rtol=1e-4)
    np.testing.assert_allclose(grads.score, 0.25 * alone()[1].score, rtol=1e-4, atol=1e-6)
    assert np.abs(twice.embed - grads.embed).max() > 1e-4


@pytest.mark.thorough
def test_a_shared_critic_has_the_same_losses_on_eight_devices():
    _, want = shared_numbers_on_one_device(0.25)
    _, got = shared_numbers(0.25, *LAYOUTS["2 x 2 x 2 devices"])
    assert got.keys() == want.keys()
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-4, err_msg=key)


def test_a_critic_has_a_separate_mesh():
    cfg = gae_config(mesh=RoleConfig(tensor=2), token_budget=256)
    with jax.set_mesh(make_mesh(fsdp=8)):
        critic = make_critic(cfg, Path(), MODEL, np.dtype(np.float32), 10)
        assert critic.scorer.n_ranks == 4 and critic.scorer.layout.resharding is not None
        assert critic.state.params.layers[0].mlp.up.w.sharding.spec == jax.P("tensor", "fsdp")
        assert critic.state.params.score.shape == (1, 16) and critic.state.params.lm_head is None
        assert critic.scorer.cfg.learner.token_budget == 256
        assert shared_value_scorer(cfg, np.dtype(np.float32)).n_ranks == 8
        with pytest.raises(ValueError, match=r"2 kv heads over tensor=8.*config\.critic\.mesh"):
            wide = dataclasses.replace(cfg.critic, mesh=RoleConfig(tensor=8))
            make_critic(
                dataclasses.replace(cfg, critic=wide), Path(), MODEL, np.dtype(np.float32), 10
            )


def test_an_offloaded_critic_is_on_the_devices_during_its_updates_only():
    def kinds(params) -> set[str]:
        return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(params)}

    cfg = gae_config()
    cfg = dataclasses.replace(cfg, learner=dataclasses.replace(cfg.learner, offload=("critic",)))
    with jax.set_mesh(make_mesh(fsdp=2)):
        critic = make_critic(cfg, Path(), MODEL, np.dtype(np.float32), 10)
        critic.restore(init_state(params_of(CRITIC, TRAIN), critic.optimizer))
        before = jax.device_get(critic.state.params)
        assert kinds(critic.state.params) == {"pinned_host"} and kinds(critic.params) == {"device"}
        with critic.training():
            assert kinds(critic.state.params) == {"device"}
        assert kinds(critic.state.params) == {"pinned_host"}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(critic.params), before)
