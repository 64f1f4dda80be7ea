"""The further parts of the objective: hand numbers, and the sum of single objectives on any layout.

Tests of `part_sums`, and of the update with algorithm.parts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.data.packing import empty_batch, pack
from jaxrl.learner.loss import loss_gradients, policy_objective
from jaxrl.learner.policy_objective import Coefs, part_sums
from jaxrl.learner.step import put_batch
from jaxrl.learner.xla import compiler_options
from jaxrl.runtime.flat_program import unflatten
from jaxrl.trainer.phases.parts import part_coefs, policy_weight
from sharding import PIPELINE, TRAIN, make_mesh
from tests.learner.test_pipeline_1f1b import STACKED, host_weights
from tests.learner.test_prefixes import SAMPLES as GROUPS
from tests.learner.test_update import LAYOUTS, ONE, assert_same
from tests.learner.tiny_policy import (
    QUICK_COMPILE,
    batches,
    new_state,
    programs,
    put_params,
    rollouts,
    run_config,
)
from tests.marks import graded

PARTS = (
    "observations?weight=0.1",
    "demonstrations?weight=0.5&aggregation=seq_mean_token_mean",
)
LOSS = dict(aggregation="seq_mean_token_mean", old_logp="rollout", entropy_coef=0.01)


def episodes():
    """10 responses with the tokens of an environment in the middle, and 6 demonstrations."""
    found = []
    for i, sample in enumerate(rollouts()):
        if i >= 10:
            none = np.zeros(len(sample.tokens), bool)
            parts = np.where(np.arange(len(sample.tokens)) % 3 < 2, 2, 0).astype(np.int32)
            found.append(
                dataclasses.replace(
                    sample, loss_mask=none, parts=parts, advantages=None, rollout_logp=None
                )
            )
            continue
        own = np.ones(len(sample.tokens), bool)
        own[2:5] = False
        parts = np.where(own, 0, 1).astype(np.int32)
        found.append(dataclasses.replace(sample, loss_mask=own, parts=parts))
    return found


SAMPLES = episodes()


def gradient(cfg, packing, mesh_sizes=None, samples=SAMPLES):
    """(gradient of the loss, metrics) of an update on a layout."""
    algorithm, update = cfg.algorithm, programs(cfg)[1]
    policy = [s for s in samples if s.n_loss_tokens]
    coefs = part_coefs(samples, policy_weight(policy, algorithm), 0, algorithm)
    coefs = Coefs(algorithm.kl_coef, algorithm.entropy_coef, parts=coefs)
    micro = batches(samples, **packing)
    with jax.set_mesh(make_mesh(**(mesh_sizes or {}))):
        state = new_state(cfg)
        total, arrays = update.zeros(state.params), update._arrays(coefs)
        for batch in micro:
            total = update.accumulate(state.params, None, total, update.put(batch), None, arrays)
        weight = total.sums.weight
        grads = jax.device_get(jax.tree.map(lambda g: g / weight, unflatten(total.grads)))
        _, metrics = update.update(state, micro, coefs=coefs)
    return grads, metrics


@functools.cache
def mixture():
    return gradient(run_config(temperature=1.0, parts=PARTS, **LOSS), ONE)


@pytest.mark.thorough
def test_the_mixture_has_the_gradient_of_its_objectives_each_with_its_own_denominator():
    # a cross-entropy alone is the policy gradient loss of its tokens with advantages 1
    def alone(part, aggregation):
        own = [dataclasses.replace(s, loss_mask=s.parts == part, parts=None) for s in SAMPLES]
        own = [
            dataclasses.replace(s, advantages=np.ones(len(s.tokens), np.float32))
            for s in own
            if s.n_loss_tokens
        ]
        cfg = run_config(temperature=1.0, policy_loss="policy_gradient", aggregation=aggregation)
        return gradient(cfg, ONE, samples=own)

    policy = [dataclasses.replace(s, parts=None) for s in SAMPLES[:10]]
    rl = gradient(run_config(temperature=1.0, **LOSS), ONE, samples=policy)
    echo, sft = alone(1, "token_mean"), alone(2, "seq_mean_token_mean")
    grads, metrics = mixture()
    want = jax.tree.map(lambda a, b, c: a + 0.1 * b + 0.5 * c, rl[0], echo[0], sft[0])
    assert_same(grads, want)
    names = "loss/policy", "loss/entropy", "loss/clip_fraction", "mismatch/kl"
    assert_same({n: metrics[n] for n in names}, {n: rl[1][n] for n in names})
    nll = echo[1]["loss/total"], sft[1]["loss/total"]
    assert_same((metrics["loss/observations"], metrics["loss/demonstrations"]), nll)
    assert_same(metrics["loss/total"], rl[1]["loss/total"] + 0.1 * nll[0] + 0.5 * nll[1])


@pytest.mark.parametrize("layout", graded(LAYOUTS))
def test_a_mixture_does_not_depend_on_the_layout(layout):
    packing, mesh = LAYOUTS[layout]
    cfg = run_config(temperature=1.0, parts=PARTS, **LOSS)
    assert_same(gradient(cfg, packing, mesh), mixture())


def test_part_sums_have_the_hand_calculated_numbers():
    cfg = run_config(temperature=1.0, parts=PARTS)
    batch = dataclasses.replace(
        empty_batch(1, 8),
        segments=np.array([[1, 1, 1, 2, 2, 2, 2, 0]], np.int32),
        parts=np.array([[0, 1, 1, 2, 2, 0, 1, 0]], np.int32),
    )
    logp = jnp.array([[-9.0, -1.0, -2.0, -4.0, -6.0, -9.0, -3.0, jnp.inf]])
    coefs = Coefs(0.0, 0.0, parts=(0.1, 0.5))
    loss, means = part_sums(logp, jax.tree.map(jnp.asarray, batch), coefs, cfg=cfg)
    # observations: tokens 1 + 2 + 3 = 6; demonstrations: one sequence with the mean (4 + 6) / 2
    np.testing.assert_allclose(loss, 0.1 * 6 + 0.5 * 5, rtol=1e-6)
    np.testing.assert_allclose(means["loss/observations"], (6, 3), rtol=1e-6)
    np.testing.assert_allclose(means["loss/demonstrations"], (5, 1), rtol=1e-6)


def test_part_sums_do_not_depend_on_the_packing():
    cfg, coefs = run_config(temperature=1.0, parts=PARTS), Coefs(0.0, 0.0, parts=(0.3, 0.7))
    program = jax.jit(functools.partial(part_sums, cfg=cfg))
    logps = [-np.random.default_rng(i).random(len(s.tokens)) for i, s in enumerate(SAMPLES)]

    def sums(rows, row_len):
        found = []
        for micro in pack(SAMPLES, shapes=((rows, row_len),), align=8, n_ranks=1):
            logp = np.full(micro.batch.tokens.shape, np.nan, np.float32)
            for span in micro.spans:
                logp[span.row, span.start : span.start + span.length] = logps[span.item]
            found.append(program(logp, micro.batch, coefs))
        assert len(found) > 1 or rows > 4
        return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), found)

    assert_same(sums(2, 64), sums(16, 32))


def test_the_factors_divide_each_part_by_its_own_denominator():
    cfg = run_config(parts=PARTS).algorithm
    samples = SAMPLES[:2] + SAMPLES[10:12]
    n_tokens = sum(int((s.parts == 1).sum()) for s in samples)
    got = part_coefs(samples, 12.0, 0, cfg)
    # 0.1 * 12 / tokens, and 0.5 * 12 / 2 sequences
    np.testing.assert_allclose(got, (1.2 / n_tokens, 3.0), rtol=1e-12)
    assert part_coefs(samples[:2], 12.0, 0, cfg)[1] == 0.0  # no demonstrations


def pipelined(schedule, mesh, rules, *, shared):
    """(gradient of the summed loss, sums) over the micro-batches of prompts with four responses."""
    samples = []
    for s in GROUPS:
        own = np.arange(len(s.tokens)) % 3 != 1
        parts = np.where(own, 0, 1 + s.sample % 2).astype(np.int32)
        samples.append(dataclasses.replace(s, loss_mask=own, parts=parts))
    packed = pack(samples, shapes=((2, 64),), align=4, n_ranks=1, share_prefixes=shared)
    learner = dict(remat="full", pipeline_schedule=schedule)
    cfg = run_config(learner, temperature=1.0, parts=PARTS, **LOSS)

    @functools.partial(jax.jit, compiler_options=compiler_options(QUICK_COMPILE, "cpu"))
    def run(params, batch):
        coefs = Coefs(0.0, 0.01, parts=(0.3, 0.7))
        return loss_gradients(
            policy_objective, params, None, batch, None, coefs, cfg=cfg, rules=rules
        )

    with jax.set_mesh(make_mesh(None, **mesh)):
        params = put_params(host_weights(STACKED, 0), STACKED, rules)
        put = functools.partial(put_batch, rules=rules, has_parts=True)
        found = [jax.device_get(run(params, put(p.batch))) for p in packed]
    return len(packed), functools.reduce(
        lambda a, b: (jax.tree.map(np.add, a[0], b[0]), a[1] + b[1]), found
    )


@pytest.mark.thorough
def test_a_mixture_does_not_depend_on_shared_prefixes_and_1f1b():
    n_want, want = pipelined("gpipe", {}, TRAIN, shared=False)
    n_got, got = pipelined("1f1b", dict(stage=2), PIPELINE, shared=True)
    assert n_got < n_want
    assert_same(got, want)
