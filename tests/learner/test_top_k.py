"""Divergence from the most likely ids of a teacher: any layout, and all ids but one."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.data.packing import gather, pack
from jaxrl.learner.requirements import full_kl_in_loss, needs_ref_logp, needs_ref_scores
from jaxrl.learner.step import make_top_k, put_batch, take_tokens
from jaxrl.types import TeacherTokens
from sharding.rules import PIPELINE, RING, TRAIN
from tests.learner.test_pipeline_1f1b import STACKED
from tests.learner.test_update import LAYOUTS, ONE, assert_same
from tests.learner.tiny_policy import (
    MODEL,
    batches,
    new_params,
    new_state,
    programs,
    rollouts,
    run_config,
    update_once,
)

KEYS = dict(kl="jsd", kl_coef=0.5, kl_beta=0.3, aggregation="token_mean", old_logp="rollout")


def taught(k, seed=1):
    """Samples with a teacher of random logits; every third one has none."""
    rng = np.random.default_rng(seed)

    def teacher(n):
        logits = rng.standard_normal((n, MODEL.V)) * 3
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        ids = np.argsort(-logp, axis=-1)[:, :k]
        return TeacherTokens(ids.astype(np.int32), np.take_along_axis(logp, ids, -1).astype("f4"))

    return [
        s if i % 3 == 0 else dataclasses.replace(s, teacher=teacher(len(s.tokens)))
        for i, s in enumerate(rollouts())
    ]


def test_a_teacher_that_scores_before_the_update_has_no_reference_inside_it():
    cfg = run_config(**KEYS, kl_top_k=4)
    assert needs_ref_scores(cfg) and not needs_ref_logp(cfg) and not full_kl_in_loss(cfg)
    assert full_kl_in_loss(run_config(**KEYS)) and not needs_ref_scores(run_config(**KEYS))


def test_packing_keeps_the_ids_at_their_targets():
    samples = taught(4)
    packed = pack(samples, shapes=((4, 32),), align=8, n_ranks=1)
    found = gather([p.batch.teacher.ids for p in packed], packed)
    known = gather([p.batch.teacher.known for p in packed], packed)
    for s, ids, one in zip(samples, found, known, strict=True):
        np.testing.assert_array_equal(one, s.loss_mask * (s.teacher is not None))
        if s.teacher is not None:
            np.testing.assert_array_equal(ids, s.teacher.ids)


@pytest.fixture(scope="module")
def whole():
    return update_once(run_config(**KEYS, kl_top_k=4), batches(taught(4), **ONE), {})


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_update_does_not_depend_on_the_layout(layout, whole):
    packing, mesh = LAYOUTS[layout]
    cfg = run_config(**KEYS, kl_top_k=4)
    assert_same(update_once(cfg, batches(taught(4), **packing), mesh), whole)
    assert whole[1]["loss/kl"] > 0.1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "rules", "schedule"),
    [
        (dict(sequence=2), RING, "gpipe"),
        (dict(stage=2), PIPELINE, "1f1b"),
        (dict(stage=2, sequence=2), RING.with_stages(), "1f1b"),
    ],
    ids=["ring", "1f1b", "ring in 1f1b"],
)
def test_ring_attention_and_1f1b_give_the_numbers_of_one_device(mesh, rules, schedule):
    packing = dict(row_len=32, token_budget=64)
    learner = dict(remat="full", pipeline_schedule=schedule)
    cfg = run_config(learner, **KEYS, kl_top_k=4)
    want = update_once(run_config(**KEYS, kl_top_k=4), batches(taught(4), **packing), {}, STACKED)
    got = update_once(cfg, batches(taught(4), **packing), mesh, STACKED, rules)
    assert_same(got, want)


@pytest.mark.thorough
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_all_ids_but_one_give_the_divergence_over_the_vocabulary(one_device, beta):
    keys = KEYS | dict(kl_beta=beta)
    samples, ref, results = rollouts(), new_params(seed=1), []
    for k in (0, MODEL.V - 1):
        cfg = run_config(**keys, kl_top_k=k)
        state, update = new_state(cfg), programs(cfg)[1]
        [batch] = packed = batches(samples, **ONE)
        if k:
            found = make_top_k(cfg, TRAIN)(ref, put_batch(batch, TRAIN))
            ids, logp = (np.asarray(take_tokens(a, TRAIN)) for a in found)
            teacher = update.put(batch).teacher.replace(ids=ids, logp=logp, known=batch.mask)
            packed = [dataclasses.replace(batch, teacher=jax.device_get(teacher))]
        state, metrics = update.update(state, packed, ref_params=None if k else ref)
        results.append([metrics["loss/kl"], metrics["optim/grad_norm"]])
    np.testing.assert_allclose(results[1], results[0], rtol=2e-4)
    assert results[0][0] > 1e-3
