"""Replayed experts: the same numbers as the router's own choice if they are equal, else given ones.

Tests of jaxrl/models/router_replay.py and of the learner's part of it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.checks.algorithm import router_replay_errors
from jaxrl.data.routing import PackedExperts, all_experts, join_packed_experts, to_array
from jaxrl.learner.loss import loss_gradients, policy_objective
from jaxrl.learner.router_replay import with_router_replay
from jaxrl.learner.step import make_score, put_batch, take_tokens
from jaxrl.learner.xla import compiler_options
from jaxrl.models.config import RouterConfig
from jaxrl.models.layers.router import route
from jaxrl.models.packed import forward_routed
from sharding import PIPELINE, RING, TRAIN, make_mesh
from tests.learner.tiny_policy import (
    MODEL,
    MOE,
    QUICK_COMPILE,
    batches,
    new_params,
    rollouts,
    run_config,
)
from tests.marks import graded

LISTED = dataclasses.replace(MOE, stacked=False)
ROUTING = (2, 2)  # two layers, two experts of a token
[BATCH] = batches(rollouts(), row_len=64, token_budget=256)
CFG = run_config(dict(router_replay="R2"), old_logp="rollout")
OFF = run_config(old_logp="rollout")


@functools.cache
def experts_of(model) -> np.ndarray:
    """The experts [B, T, L, k] that the scoring of the old logprobs records, on one device."""
    with jax.set_mesh(make_mesh()):
        score = make_score(CFG, TRAIN, records=True)
        return take_tokens(score(new_params(model=model), put_batch(BATCH, TRAIN))[2], TRAIN)


def gradients(model, experts: PackedExperts | None, mesh=None, rules=TRAIN, **learner):
    """(gradient, sums) of the micro-batch with replayed experts; None: the router's own."""
    learner = {} if experts is None else dict(router_replay="R2") | learner
    cfg = run_config(learner, old_logp="rollout")
    run = functools.partial(loss_gradients, policy_objective, cfg=cfg, rules=rules)
    run = jax.jit(run, compiler_options=compiler_options(QUICK_COMPILE, "cpu"))
    with jax.set_mesh(make_mesh(**mesh or {})):
        batch = dataclasses.replace(BATCH, experts=experts)
        inputs = put_batch(batch, rules, routing=ROUTING if experts is not None else None)
        return jax.device_get(run(new_params(model=model, rules=rules), None, inputs))


def other_experts() -> PackedExperts:
    """Random pairs of different experts for all tokens."""
    draw = np.random.default_rng(0).random((*BATCH.tokens.shape, 2, MOE.expert_layers[0].E))
    return all_experts(np.argsort(draw, axis=-1)[..., :2].astype(np.uint8), BATCH.segments)


@pytest.mark.bitwise
@pytest.mark.parametrize("model", graded([LISTED, MOE]))
def test_a_replay_of_the_routers_own_choice_changes_no_bit(model):
    grads, sums = gradients(model, all_experts(experts_of(model), BATCH.segments))
    want = gradients(model, None)
    router = dataclasses.replace(sums.router, replayed=None, changed=None)
    found = grads, dataclasses.replace(sums, router=router)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    n_tokens = (BATCH.segments > 0).sum()
    np.testing.assert_array_equal(sums.router.replayed, n_tokens)
    np.testing.assert_array_equal(sums.router.changed, 0)


@pytest.mark.thorough
def test_the_scored_experts_are_those_of_the_load(one_device):
    experts = experts_of(LISTED)
    assert experts.dtype == np.uint8 and experts.shape == (*BATCH.tokens.shape, *ROUTING)
    b = put_batch(BATCH, TRAIN)
    _, load = forward_routed(
        new_params(model=LISTED), b.tokens, b.segments, b.positions, rules=TRAIN
    )
    chosen = experts[BATCH.segments > 0]
    counts = [np.bincount(chosen[:, layer].ravel(), minlength=4) for layer in range(2)]
    np.testing.assert_array_equal(load.count, counts)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.thorough
def test_given_experts_are_applied_with_the_weights_of_the_current_router(one_device):
    """The reference is the sum over the experts of a token, in numpy; a token of -1 has its own."""
    layer = new_params(model=LISTED).layers[0].mlp
    x = np.random.default_rng(0).standard_normal((1, 3, 16)).astype(np.float32)
    given = np.array([[[3, 1], [-1, -1], [0, 2]]], np.int16)
    y, load = jax.jit(functools.partial(layer.__call__, rules=TRAIN))(
        jnp.asarray(x), jnp.ones((1, 3), bool), given=jnp.asarray(given)
    )
    router, gate, up, down = map(np.asarray, (layer.router, layer.gate, layer.up, layer.down))
    for t, token in enumerate(x[0]):
        scores = softmax(router @ token)
        best = np.argsort(-scores)[:2]
        experts = best if t == 1 else given[0, t]
        want = np.zeros(16)
        for e in experts:
            a, b = gate[e] @ token, up[e] @ token
            want += scores[e] / scores[experts].sum() * (down[e] @ (a / (1 + np.exp(-a)) * b))
        np.testing.assert_allclose(y[0, t], want, rtol=1e-4, atol=1e-4)
    own = [set(np.argsort(-softmax(router @ token))[:2]) for token in x[0]]
    assert load.replayed == 2
    assert load.changed == sum(own[t] != set(given[0, t]) for t in (0, 2))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_routers_are_float32_and_weights_of_given_experts_sum_to_one(score, one_device):
    """Also of bfloat16 activations. A correction does not weight given experts."""
    layer = new_params(jnp.bfloat16, LISTED).layers[0].mlp
    layer.cfg = RouterConfig(2, score, scale=1.0)
    x = jnp.ones((1, 4, 16), jnp.bfloat16)
    text = str(jax.make_jaxpr(functools.partial(layer.__call__, rules=TRAIN))(x, x[..., 0] > 0))
    routed = text[: text.index("ragged_dot")] if "ragged_dot" in text else text
    assert "bf16[1,4,4]" not in routed and "f32[1,4,4]" in routed
    logits = jnp.array([[[0.0, 1.0, 2.0, 3.0]]])
    given, bias = jnp.array([[[0, 2]]], jnp.int16), jnp.array([9.0, 9.0, 0.0, 0.0])
    run = jax.jit(functools.partial(route, router=layer.cfg))
    _, weights, experts, changed = run(logits, bias, given)
    s = softmax(np.arange(4.0)) if score == "softmax" else 1 / (1 + np.exp(-np.arange(4.0)))
    np.testing.assert_allclose(weights[0, 0], s[[0, 2]] / s[[0, 2]].sum(), rtol=1e-6)
    assert weights.dtype == jnp.float32 and experts.tolist() == [[[0, 2]]] and changed.all()


LAYOUTS = {
    "expert 2, tensor 2": (dict(fsdp=2, expert=2, tensor=2), TRAIN, {}),
    "ring": (dict(fsdp=2, sequence=2, expert=2), RING, {}),
    "recomputed in groups": ({}, TRAIN, dict(remat="full?group=2")),
    "1f1b": (dict(stage=2, expert=2), PIPELINE, dict(pipeline_schedule="1f1b")),
    "gpipe": (dict(stage=2, expert=2), PIPELINE, {}),
}


@functools.cache
def alone():
    return gradients(MOE, other_experts())


@pytest.mark.parametrize("layout", graded(LAYOUTS))
def test_replayed_updates_do_not_depend_on_the_layout(layout):
    mesh, rules, learner = LAYOUTS[layout]
    found = gradients(MOE, other_experts(), mesh, rules, **learner)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(same, found, alone())
    changed = found[1].router.changed
    assert (changed > 0).all() and (changed < found[1].router.replayed).all()


def test_tokens_without_experts_have_none_on_the_device():
    """Two micro-batches of 3 tokens; token 2 of the first and token 0 of the second have some."""
    parts = [PackedExperts(np.array([i]), np.full((1, 1, 2), i, np.uint8)) for i in (2, 0)]
    array = to_array(join_packed_experts(parts, 3), (2, 3), (1, 2))
    assert array.dtype == np.int16
    np.testing.assert_array_equal(array[..., 0, 0], [[-1, -1, 2], [0, -1, -1]])


def resolved(model=MOE, platform="cpu", **keys) -> tuple[str, str]:
    """(router replay, reason) of a run with these keys by section."""
    cfg = run_config()
    for section, values in keys.items():
        cfg = dataclasses.replace(
            cfg, **{section: dataclasses.replace(getattr(cfg, section), **values)}
        )
    cfg, reason = with_router_replay(cfg, model, platform)
    return cfg.learner.router_replay, reason


def test_auto_replays_the_rollout_where_it_computes_in_another_way():
    assert resolved() == ("off", "rollout and training compute the same")
    assert resolved(MODEL, "gpu") == ("off", "the model has no experts")
    assert resolved(platform="tpu") == ("R3", "rollout and training have other kernels on tpu")
    found = resolved(rollout=dict(dtype="int8"), mesh=dict(expert=2))
    assert found == ("R3", "rollout.dtype='int8'; mesh.expert=2")
    assert resolved(platform="gpu", critic=dict(shared=True))[0] == "off"
    assert resolved(platform="gpu", learner=dict(router_replay="off")) == ("off", "")
    with pytest.raises(ValueError, match=r"router replay needs .* this qwen2 model has none"):
        resolved(MODEL, learner=dict(router_replay="R3"))


def test_replays_that_cannot_work_are_refused():
    run = run_config(dict(router_replay="R2"))
    assert "scores none" in router_replay_errors(run, "R2")[0]
    recomputed = run_config(old_logp="recompute")
    assert not router_replay_errors(recomputed, "R2") and not router_replay_errors(run, "R3")
    staged = dataclasses.replace(recomputed, mesh=dataclasses.replace(run.mesh, stage=2))
    assert "pipeline stages (mesh.stage=2)" in router_replay_errors(staged, "R2")[0]
    assert not router_replay_errors(staged, "R3")
