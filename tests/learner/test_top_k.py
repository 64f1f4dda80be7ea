"""Divergence from the most likely ids of a teacher: any layout, and all ids but one."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.data.packing import empty_teacher, gather, pack
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


def coarse(p, q, ids, beta):
    """GKD, eq. 1, over these ids and one bucket for all others, in numpy."""
    p, q = (np.append(x[ids], 1.0 - x[ids].sum()) for x in (p, q))
    m = beta * q + (1.0 - beta) * p
    return beta * np.sum(q * np.log(q / m)) + (1.0 - beta) * np.sum(p * np.log(p / m))


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["student", "union"])
def test_the_ids_of_the_policy_give_the_divergence_of_the_reference_form(one_device, source):
    cfg = run_config(temperature=1.0, **KEYS, kl_top_k=3, kl_top_k_from=source)
    everything = run_config(temperature=1.0, **KEYS, kl_top_k=MODEL.V)
    state, update = new_state(cfg), programs(cfg)[1]
    ref = new_params(seed=1)
    [batch] = batches(rollouts(), **ONE)
    program = make_top_k(cfg, TRAIN)
    [ids, _] = [
        np.asarray(take_tokens(x, TRAIN)) for x in program(state.params, put_batch(batch, TRAIN))
    ]
    teacher = empty_teacher(batch.tokens.shape, 3).replace(ids=ids)
    given = put_batch(dataclasses.replace(batch, teacher=teacher), TRAIN, n_ids=3)
    found = make_top_k(cfg, TRAIN, given=True)(ref, given)
    ids, logp = (np.asarray(take_tokens(x, TRAIN)) for x in found)
    assert update.n_ids == ids.shape[-1] == (6 if source == "union" else 3)

    distributions = []
    for params in (state.params, ref):
        order, values = make_top_k(everything, TRAIN)(params, put_batch(batch, TRAIN))
        p = np.zeros((*batch.tokens.shape, MODEL.V))
        np.put_along_axis(p, np.asarray(order), np.exp(np.asarray(values, float)), -1)
        distributions.append(p)
    kl = []
    for b, t in zip(*np.nonzero(batch.mask), strict=True):
        p, q = (x[b, t] for x in distributions)
        compared = {*np.argsort(-p)[:3].tolist()}
        if source == "union":
            compared |= {*np.argsort(-q)[:3].tolist()}
        assert {i for i in ids[b, t].tolist() if i >= 0} == compared
        kl.append(coarse(p, q, sorted(compared), 0.3))
    teacher = teacher.replace(ids=ids, logp=logp, known=batch.mask)
    _, metrics = update.update(state, [dataclasses.replace(batch, teacher=teacher)])
    np.testing.assert_allclose(metrics["loss/kl"], np.mean(kl), rtol=1e-4)


@pytest.mark.thorough
def test_ids_beyond_the_vocabulary_of_the_teacher_are_not_compared(one_device):
    cfg = run_config(**KEYS, kl_top_k=2, kl_top_k_from="student")
    [batch] = batches(rollouts(2), **ONE)
    teacher = empty_teacher(batch.tokens.shape, 2)
    teacher.ids[..., 0], teacher.ids[..., 1] = MODEL.V + 3, 5
    given = put_batch(dataclasses.replace(batch, teacher=teacher), TRAIN, n_ids=2)
    ids, logp = make_top_k(cfg, TRAIN, given=True)(new_params(), given)
    assert np.asarray(ids)[..., 0].max() == -1 and np.asarray(ids)[..., 1].min() == 5
    assert np.isfinite(logp).all()


def united(k):
    """`taught` with as many further ids, every third one of which is there already."""

    def widened(s):
        if s.teacher is None:
            return s
        more = taught_ids(s, k)
        more = np.where(np.arange(k) % 3 == 0, -1, more).astype(np.int32)
        logp = np.full(more.shape, -6.0, np.float32)
        both = np.concatenate([s.teacher.ids, more], -1), np.concatenate([s.teacher.logp, logp], -1)
        return dataclasses.replace(s, teacher=TeacherTokens(*both))

    return [widened(s) for s in taught(k)]


def taught_ids(sample, k):
    """The k smallest ids that the teacher of a sample does not have, at every token."""
    every = np.arange(MODEL.V)
    return np.stack([np.setdiff1d(every, ids)[:k] for ids in sample.teacher.ids])


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["two micro-batches", "replica 2, fsdp 2, tensor 2"])
def test_the_union_does_not_depend_on_the_layout(layout):
    packing, mesh = LAYOUTS[layout]
    cfg = run_config(**KEYS, kl_top_k=4, kl_top_k_from="union")
    whole = update_once(cfg, batches(united(4), **ONE), {})
    assert_same(update_once(cfg, batches(united(4), **packing), mesh), whole)


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
