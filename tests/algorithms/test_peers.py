"""Estimators, losses, KL terms and corrections against NumPy ports of verl, OpenRLHF and TRL.

The batch has observation tokens, responses of uneven length and padding; jaxrl packs it into
several micro-batches, the ports (peers.py) see padded rows. Losses are compared with gradients.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.advantages import ADVANTAGES
from jaxrl.algorithms.kl import KL_ESTIMATORS
from jaxrl.algorithms.losses.aggregation import AGGREGATIONS
from jaxrl.algorithms.losses.policy_loss import POLICY_LOSSES
from jaxrl.algorithms.losses.preference import dpo, ipo, kto
from jaxrl.algorithms.losses.rejection import REJECTIONS
from jaxrl.algorithms.losses.value_loss import value_loss
from jaxrl.config.choices import FULL_KLS
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.learner.policy_objective import (
    accepted_tokens,
    importance_weights,
    on_policy_tokens,
    policy_loss,
    reference_kl,
    token_loss_sums,
)
from jaxrl.trainer.phases.advantage import RewardParts, add_advantages
from jaxrl.trainer.phases.mini_batches import MiniBatch, with_mean_weight
from tests.algorithms import peers
from tests.algorithms.responses import (
    BATCH,
    FILLED,
    IN_RESPONSE,
    LENGTHS,
    LONGEST,
    MASK,
    MICRO_BATCHES,
    SAMPLES,
    N,
    T,
    config,
    loss_and_gradient,
    placed,
    sample,
    token_values,
)

RNG = np.random.default_rng(5)


def assert_same(got, peer_loss, aggregation="token_mean"):
    """`got` is the loss and gradient of peer_loss(logp, sg) -> [N, T]."""
    reduce = peers.AGGREGATIONS[aggregation]

    def total(logp):
        return reduce(peer_loss(logp, BATCH.logp), MASK, LONGEST)

    value, grad = got
    np.testing.assert_allclose(value, total(BATCH.logp), rtol=2e-5, atol=1e-6)
    want = peers.gradient(total, BATCH.logp)
    np.testing.assert_allclose(grad, want * MASK, rtol=1e-3, atol=2e-6)


def test_the_batch_is_what_it_should_be():
    assert len(MICRO_BATCHES) > 2
    assert len(set(LENGTHS.tolist())) > 3
    observations = IN_RESPONSE & (MASK == 0)
    assert observations.sum() > 5


PAPER = dict(gspo="seq_mean_token_mean", gspo_token="seq_mean_token_mean")
PAPER |= dict(gmpo="seq_mean_token_mean", sapo="seq_mean_token_mean")
# Bounds that mask some tokens of this batch, and the coefficient of the squared log ratio.
BOUNDED = dict(
    dppo_tv=dict(clip_low=0.01, clip_high=0.02),
    dppo_kl=dict(clip_low=1e-3, clip_high=2e-3),
    dro=dict(log_ratio_penalty=0.3),
)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_and_their_gradients(name):
    cfg = config(policy_loss=name, **BOUNDED.get(name, {}))
    bounds, aggregation = cfg.algorithm, PAPER.get(name, "token_mean")
    got = loss_and_gradient(lambda x, batch, a: policy_loss(x, a), cfg, aggregation)
    peer = peers.POLICY_LOSSES[name]
    low, high = bounds.clip_low, bounds.clip_high
    assert_same(got, lambda logp, sg: peer(logp, sg, BATCH, low, high), aggregation)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations(name):
    got = loss_and_gradient(lambda x, batch, a: policy_loss(x, a), config(), name)
    assert_same(got, lambda logp, sg: peers.ppo_clip(logp, sg, BATCH, 0.2, 0.28), name)


def test_luspo_is_gspo_with_the_sum_over_the_tokens_of_a_response():
    got = loss_and_gradient(
        lambda x, batch, a: policy_loss(x, a), config(policy_loss="gspo"), "seq_mean_token_sum"
    )
    per_response = peers.gspo(BATCH.logp, BATCH.logp, BATCH, 0.2, 0.28)[:, 0]
    np.testing.assert_allclose(got[0], (MASK.sum(1) * per_response).mean(), rtol=2e-5)
    assert_same(got, lambda logp, sg: peers.gspo(logp, sg, BATCH, 0.2, 0.28), "seq_mean_token_sum")


def test_clamped_log_ratios_are_those_of_verl():
    """The ports have the clamp of 20, which changes nothing here; at 0.2 gradients vanish."""
    cfg = config(policy_loss="sapo", log_ratio_clamp=0.2)
    _, grad = loss_and_gradient(lambda x, batch, a: policy_loss(x, a), cfg)
    beyond = np.abs(BATCH.logp - BATCH.old_logp) > 0.2
    np.testing.assert_array_equal(grad[MASK > 0] == 0, beyond[MASK > 0])


@pytest.mark.parametrize("name", [n for n in KL_ESTIMATORS if n not in FULL_KLS])
def test_kl_estimators_and_their_gradients(name):
    got = loss_and_gradient(
        lambda x, batch, a: reference_kl(x["logp"], x, None, batch, a), config(kl=name, kl_coef=1.0)
    )
    assert_same(got, lambda logp, sg: peers.KLS[name](logp, sg, BATCH))


D = BATCH.old_logp - BATCH.rollout_logp
CORRECTIONS = {
    "verl token": (
        dict(correction="token_tis", correction_high=1.2),
        peers.verl_token(D, MASK, 1.2),
    ),
    "verl sequence": (
        dict(correction="seq_tis", correction_high=1.2),
        peers.verl_sequence(D, MASK, 1.2),
    ),
    "TRL token_truncate": (
        dict(correction="token_tis", correction_floor=0.8, correction_high=1.2),
        peers.trl("token_truncate", D, MASK, 0.8, 1.2),
    ),
    "TRL sequence_truncate": (
        dict(correction="seq_tis", correction_floor=0.8, correction_high=1.2),
        peers.trl("sequence_truncate", D, MASK, 0.8, 1.2),
    ),
    "TRL token_mask": (
        dict(correction="icepop", correction_low=0.8, correction_high=1.2),
        peers.trl("token_mask", D, MASK, 0.8, 1.2),
    ),
    "TRL sequence_mask": (
        dict(correction="seq_icepop", correction_low=0.4, correction_high=2.5),
        peers.trl("sequence_mask", D, MASK, 0.4, 2.5),
    ),
    "OpenRLHF tis": (
        dict(correction="token_tis", correction_floor=0.8, correction_high=1.2),
        peers.openrlhf("tis", D, MASK, 0.8, 1.2),
    ),
    "OpenRLHF icepop": (
        dict(correction="icepop", correction_low=0.8, correction_high=1.2),
        peers.openrlhf("icepop", D, MASK, 0.8, 1.2),
    ),
    "OpenRLHF seq-mask-tis": (
        dict(correction="token_tis", correction_high=1e9)
        | dict(rejection="seq_mean_k1", rejection_low=0.95, rejection_high=1.05),
        peers.openrlhf("seq-mask-tis", D, MASK, 0.95, 1.05),
    ),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_importance_weights(name):
    keys, want = CORRECTIONS[name]
    got = token_values(
        lambda x, a: importance_weights(x, a) * accepted_tokens(x, a), config(**keys)
    )
    np.testing.assert_allclose(got, want * MASK, rtol=1e-5, atol=1e-7)
    assert len(np.unique(want[MASK > 0])) > 3, "the bounds do not decide everything"


@pytest.mark.parametrize("level, correction", [("token", "token_tis"), ("sequence", "seq_tis")])
def test_weights_of_mean_one(level, correction):
    cfg = config(correction=correction, correction_high=1.2, correction_normalize=True)
    weights = {"token": peers.verl_token, "sequence": peers.verl_sequence}[level](D, MASK, 1.2)
    mean = with_mean_weight(MiniBatch(FILLED), cfg.algorithm).mean_weight
    got = token_values(importance_weights, cfg) / mean
    np.testing.assert_allclose(got, peers.verl_normalized(weights, MASK, level) * MASK, rtol=1e-5)


# Thresholds that reject some tokens or responses of this batch, and keep others.
BOUNDS = dict(token_k1=(0.8, 1.2), seq_sum_k1=(0.6, 1.6), seq_mean_k1=(0.95, 1.05))
MAXIMA = dict(token_k2=0.02, token_k3=0.02, seq_sum_k2=0.3, seq_sum_k3=0.3, seq_mean_k2=0.04)
MAXIMA |= dict(seq_mean_k3=0.04, seq_max_k2=0.15, seq_max_k3=0.15)


def test_the_sequence_gate_of_molt():
    cfg = config(rejection="seq_mean_binary_kl", rejection_max=3e-3)
    want = peers.molt_sequence_gate(BATCH.rollout_logp, BATCH.old_logp, MASK, 3e-3) * MASK
    np.testing.assert_array_equal(token_values(accepted_tokens, cfg), want)
    assert 0 < want.sum() < MASK.sum()


@pytest.mark.parametrize("name", [n for n in REJECTIONS if n in {*BOUNDS, *MAXIMA}])
def test_rejections(name):
    if name in BOUNDS:
        low, high = BOUNDS[name]
        keys = dict(rejection_low=low, rejection_high=high)
        # verl bounds the engine's probability over the trainer's
        lower, upper = 1 / high, 1 / low
    else:
        lower, upper = 0.0, MAXIMA[name]
        keys = dict(rejection_max=upper)
    got = token_values(accepted_tokens, config(rejection=name, **keys))
    want = peers.verl_rejection(name, D, MASK, lower, upper) * MASK
    np.testing.assert_array_equal(got, want)
    assert 0 < want.sum() < MASK.sum()


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_tokens_that_verl_rejects_leave_every_term_and_the_denominator(aggregation):
    keys = dict(aggregation=aggregation, correction="token_tis", kl="k3", kl_coef=0.5)
    cfg = config(rejection="token_k2", rejection_max=0.02, **keys)
    sums, weight = 0.0, 0.0
    for batch, logp in zip(MICRO_BATCHES, placed(BATCH.logp), strict=True):
        loss, found = token_loss_sums(jnp.asarray(logp), jnp.zeros_like(logp), None, batch, cfg=cfg)
        sums, weight = sums + float(loss), weight + float(found.weight)
    mask = MASK * peers.verl_rejection("token_k2", D, MASK, 0.0, 0.02)
    per_token = peers.ppo_clip(BATCH.logp, BATCH.logp, BATCH, 0.2, 0.28) * peers.verl_token(D, MASK)
    per_token += 0.5 * peers.KLS["k3"](BATCH.logp, BATCH.logp, BATCH)
    some = mask.sum(1) > 0  # a response without tokens is not counted
    want = peers.AGGREGATIONS[aggregation](per_token[some], mask[some], LONGEST)
    np.testing.assert_allclose(sums / weight, want, rtol=1e-5)


def test_the_off_policy_mask_of_trl():
    got = token_values(on_policy_tokens, config(off_policy_threshold=0.02))
    want = peers.trl_off_policy_mask(BATCH.logp, BATCH, 0.02) * MASK
    np.testing.assert_array_equal(got, want)
    assert 0 < want.sum() < MASK.sum()


# Estimators that are compared elsewhere: turns, roles and pairs in test_advantages.py and
# test_role_advantages.py, the token baseline with verl itself in test_golden.py
NO_PORT = {"distill", "gigpo", "hierarchical_grpo", "online_dpo", "optimal_token_baseline", "rae"}


@pytest.mark.parametrize("kl_in_reward", [False, True])
@pytest.mark.parametrize("name", [n for n in ADVANTAGES if n not in NO_PORT])
def test_advantages(name, kl_in_reward):
    if kl_in_reward and name in ("max_rl", "gdpo"):
        return  # refused
    scores = RNG.integers(0, 3, N).astype(float)
    scores[:SAMPLES] = 1.0  # a group of equal rewards
    kl = 0.1 * (BATCH.rollout_logp - BATCH.ref_logp) * MASK * kl_in_reward
    values = RNG.standard_normal((N, T)).astype(np.float32).astype(float)
    keys = dict(gamma=0.9, lam=0.8) if name in ("gae", "reinforce_plus_plus") else {}
    cfg = AlgorithmConfig(advantage=name, **keys)
    parts = RewardParts(RNG.standard_normal((N, 2)), np.array([1.0, 0.3]))
    baselines = np.repeat(RNG.random(N // SAMPLES), SAMPLES)
    samples = [
        dataclasses.replace(sample(i), values=values[i, : LENGTHS[i]].astype(np.float32))
        for i in range(N)
    ]
    got = add_advantages(
        samples,
        scores,
        cfg,
        penalties=[k[:n].astype(np.float32) for k, n in zip(kl, LENGTHS, strict=True)],
        baselines=baselines,
        parts=parts,
    )
    rewards = -kl
    for i in range(N):
        rewards[i, np.flatnonzero(MASK[i])[-1]] += scores[i]
    port = peers.ADVANTAGES[name]
    extra = dict(values=values, baselines=baselines, parts=parts.values, weights=parts.weights)
    want = port(rewards, MASK, SAMPLES, gamma=0.9, lam=0.8, **extra)
    padded = np.stack([np.pad(s.advantages, (0, T - len(s.tokens))) for s in got])
    np.testing.assert_allclose(padded, want, rtol=1e-4, atol=1e-5)


def test_preference_losses():
    chosen, rejected = RNG.standard_normal(8), RNG.standard_normal(8)
    ours = jnp.asarray(chosen, jnp.float32), jnp.asarray(rejected, jnp.float32)
    for smoothing in (0.0, 0.1):
        want = peers.trl_dpo(chosen, rejected, 0.3, smoothing)
        got = dpo(*ours, beta=0.3, label_smoothing=smoothing)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    want = peers.trl_ipo(chosen, rejected, 0.3)
    np.testing.assert_allclose(ipo(*ours, beta=0.3), want, rtol=1e-5, atol=1e-6)
    got = kto(*ours, beta=0.3, kl=0.2, chosen_weight=1.5, rejected_weight=0.7).mean()
    want = peers.trl_kto(chosen, rejected, 0.2, 0.3, 1.5, 0.7)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_value_loss_of_verl():
    values, old, returns = (RNG.standard_normal((N, T)).astype(np.float32) for _ in range(3))
    got = value_loss(*map(jnp.asarray, (values, old, returns)), clip=0.3)
    want = peers.verl_value_loss(values, old, returns, 0.3)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_every_name_has_a_port():
    without = NO_PORT | {"full", "full+", "jsd"}  # these KLs are in kernels/test_divergence.py
    ours = set(itertools.chain(ADVANTAGES, POLICY_LOSSES, KL_ESTIMATORS, AGGREGATIONS))
    ports = itertools.chain(peers.ADVANTAGES, peers.POLICY_LOSSES, peers.KLS, peers.AGGREGATIONS)
    assert ours - set(ports) == without
    assert {"none", "seq_mean_binary_kl", *BOUNDS, *MAXIMA} == set(REJECTIONS)
