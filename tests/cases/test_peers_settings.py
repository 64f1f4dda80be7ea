"""The settings that docs/reference/keys.md gives for TRL's GRPO and RLOO give TRL's numbers.

`trl_loss` is a NumPy port of TRL 1.16's loss with its arguments; nothing in it comes from jaxrl.
The batch is that of tests/algorithms/responses.py: packed, with observation tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.advantages import grpo
from jaxrl.config.keys import AlgorithmConfig, DataConfig, RunConfig
from jaxrl.config.other_frameworks import table
from jaxrl.learner.policy_objective import token_loss_sums
from jaxrl.trainer.phases.advantage import add_advantages
from jaxrl.trainer.phases.mini_batches import drop_overlong
from tests.algorithms import peers
from tests.algorithms.responses import (
    BATCH,
    LENGTHS,
    LONGEST,
    MASK,
    MICRO_BATCHES,
    SAMPLES,
    N,
    T,
    placed,
    rows_of,
    sample,
)

TRL_EPS = 1e-4
ENTROPY = np.random.default_rng(5).random((N, T))
FIRST = dataclasses.replace(BATCH, old_logp=BATCH.logp)  # the first update of a generation


def trl_loss(
    logp,
    b,
    *,
    loss_type="dapo",
    epsilon=0.2,
    epsilon_high=None,
    delta=None,
    beta=0.0,
    use_bias_correction_kl=True,
    importance_sampling_level="token",
    entropy_coef=0.0,
):
    """TRL's loss of one batch in one accumulation step."""
    mask, advantages, high = b.mask, b.advantages, epsilon_high or epsilon
    log_ratio = logp - b.old_logp
    if importance_sampling_level == "sequence":
        log_ratio = peers.mean_of_responses(log_ratio, mask) * np.ones_like(logp)
    ratio = np.exp(log_ratio)
    if loss_type == "cispo":
        clipped = np.minimum(np.exp(BATCH.logp - b.old_logp), high)  # no gradient
        loss = -clipped * advantages * logp
    elif loss_type == "sapo":
        tau = np.where(advantages > 0, 1.0, 1.05)
        loss = -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantages
    else:
        bounded = ratio if delta is None else np.minimum(ratio, delta)
        clipped = np.clip(ratio, 1 - epsilon, 1 + high)
        loss = -np.minimum(bounded * advantages, clipped * advantages)
    if beta:
        kl = np.exp(b.ref_logp - logp) - (b.ref_logp - logp) - 1
        loss = loss + beta * kl * (ratio if use_bias_correction_kl else 1.0)
    n_tokens = np.maximum(mask.sum(1), 1.0)
    total = {
        "dapo": lambda: (loss * mask).sum() / mask.sum(),
        "cispo": lambda: (loss * mask).sum() / mask.sum(),
        "grpo": lambda: ((loss * mask).sum(1) / n_tokens).mean(),
        "sapo": lambda: ((loss * mask).sum(1) / n_tokens).mean(),
        "dr_grpo": lambda: (loss * mask).sum() / (len(mask) * LONGEST),
        "luspo": lambda: (loss * mask).sum(1).mean(),
    }[loss_type]()
    return total - entropy_coef * (ENTROPY * mask).sum() / mask.sum()


def trl_rloo_loss(logp, b):
    """RLOO's loss with epsilon 0.2: one ratio per response, the product over its tokens."""
    ratio = np.exp(((logp - b.old_logp) * b.mask).sum(1))
    advantages = b.advantages[:, 0]
    return -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages).mean()


def jaxrl_loss(b, **algorithm):
    """(loss, gradient [N, T]) of the packed batch."""
    keys = dict(old_logp="recompute") | algorithm
    cfg = RunConfig(algorithm=AlgorithmConfig(**keys), data=DataConfig(max_response_len=LONGEST))
    value, weight, grads = 0.0, 0.0, []
    rows = (placed(x) for x in (b.logp, b.old_logp, ENTROPY))
    for batch, logp, old_logp, entropy in zip(MICRO_BATCHES, *rows, strict=True):
        batch = batch.replace(old_logp=jnp.asarray(old_logp))

        def total(logp, batch=batch, entropy=entropy):
            return token_loss_sums(logp, jnp.asarray(entropy), None, batch, cfg=cfg)

        (loss, sums), grad = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logp))
        value, weight = value + float(loss), weight + float(sums.weight)
        grads.append(grad)
    return value / weight, rows_of(grads) / weight


def assert_same(got, peer_loss, b=BATCH):
    value, grad = got
    np.testing.assert_allclose(value, peer_loss(b.logp), rtol=2e-5, atol=1e-6)
    want = peers.gradient(peer_loss, b.logp) * MASK
    np.testing.assert_allclose(grad, want, rtol=1e-3, atol=2e-6)


# TRL's arguments, the row of the table that says what they are here, and what it says.
SETTINGS = {
    "sapo": (
        dict(loss_type="sapo"),
        "loss_type",
        dict(policy_loss="sapo", aggregation="seq_mean_token_mean"),
    ),
    "grpo": (
        dict(loss_type="grpo"),
        "loss_type",
        dict(policy_loss="ppo_clip", aggregation="seq_mean_token_mean"),
    ),
    "dapo": (
        dict(loss_type="dapo"),
        "loss_type",
        dict(policy_loss="ppo_clip", aggregation="token_mean"),
    ),
    "dr_grpo": (
        dict(loss_type="dr_grpo"),
        "loss_type",
        dict(policy_loss="ppo_clip", aggregation="seq_mean_token_sum_norm"),
    ),
    "luspo": (
        dict(loss_type="luspo", importance_sampling_level="sequence"),
        "loss_type",
        dict(policy_loss="gspo", aggregation="seq_mean_token_sum"),
    ),
    "gspo": (
        dict(loss_type="grpo", importance_sampling_level="sequence"),
        "importance_sampling_level",
        dict(policy_loss="gspo", aggregation="seq_mean_token_mean"),
    ),
    "cispo": (
        dict(loss_type="cispo", epsilon_high=1.1),
        "epsilon_high",
        dict(policy_loss="cispo", clip_high=0.1, clip_low=1.0),
    ),
    "delta": (
        dict(delta=1.5, epsilon_high=0.28),
        "delta",
        dict(policy_loss="dual_clip", clip_dual=1.5, clip_high=0.28),
    ),
    "beta": (
        dict(beta=0.3),
        "beta",
        dict(kl_coef=0.3, kl="k3_unbiased", kl_in="loss"),
    ),
    "beta, biased": (
        dict(beta=0.3, use_bias_correction_kl=False),
        "use_bias_correction_kl",
        dict(kl_coef=0.3, kl="k3", kl_in="loss"),
    ),
    "entropy": (
        dict(entropy_coef=0.3),
        "entropy_coef",
        dict(entropy_coef=0.3, aggregation="token_mean"),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_of_the_table_give_the_loss_and_gradient_of_trl(name):
    theirs, _, ours = SETTINGS[name]
    assert_same(jaxrl_loss(BATCH, **ours), lambda logp: trl_loss(logp, BATCH, **theirs))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_table_names_these_settings(name):
    _, theirs, ours = SETTINGS[name]
    (row,) = [r for r in table() if r.framework == "TRL" and theirs in r.names]
    keys = {f"algorithm.{key}" for key in ours}
    defaults = AlgorithmConfig()
    for key, value in ours.items():
        if isinstance(value, str) and value != getattr(defaults, key):
            assert f"`{value}`" in row.remark, value
    assert keys & set(row.ours)


@pytest.mark.parametrize(
    "theirs, ours, least",
    [
        # settings of an earlier table, or what a user would guess
        (dict(loss_type="sapo"), dict(policy_loss="sapo", aggregation="token_mean"), 0.3),
        (dict(beta=0.3), dict(kl_coef=0.3, kl="k3"), 0.02),
        (dict(loss_type="cispo", epsilon_high=1.1), dict(policy_loss="cispo", clip_high=1.1), 0.01),
    ],
    ids=["sapo by tokens", "biased k3", "epsilon_high of cispo as clip_high"],
)
def test_other_settings_give_other_updates(theirs, ours, least):
    _, grad = jaxrl_loss(BATCH, **ours)
    want = peers.gradient(lambda logp: trl_loss(logp, BATCH, **theirs), BATCH.logp) * MASK
    assert np.linalg.norm(grad - want) > least * np.linalg.norm(want)


def test_the_entropy_bonus_of_sequence_means_is_not_that_of_trl():
    """A sum over a response / max_response_len: smaller than TRL's by mean length / LONGEST."""
    keys = dict(aggregation="seq_mean_token_sum_norm")
    bonus = jaxrl_loss(BATCH, **keys)[0] - jaxrl_loss(BATCH, entropy_coef=0.3, **keys)[0]
    theirs = 0.3 * (ENTROPY * MASK).sum() / MASK.sum()
    np.testing.assert_allclose(bonus, theirs * MASK.sum(1).mean() / LONGEST, rtol=1e-4)


def test_rloo_at_the_first_update_is_the_policy_gradient_of_responses():
    keys = dict(policy_loss="policy_gradient", aggregation="seq_mean_token_sum")
    _, grad = jaxrl_loss(FIRST, **keys)
    want = peers.gradient(lambda logp: trl_rloo_loss(logp, FIRST), FIRST.logp) * MASK
    np.testing.assert_allclose(grad, want, rtol=1e-3, atol=2e-6)


def test_rloo_subtracts_the_kl_from_the_reward_before_the_baseline():
    scores = np.random.default_rng(6).integers(0, 3, N).astype(float)
    kl = ((BATCH.rollout_logp - BATCH.ref_logp) * MASK).sum(1)
    rewards = (scores - 0.05 * kl).reshape(-1, SAMPLES)
    want = rewards - (rewards.sum(1, keepdims=True) - rewards) / (SAMPLES - 1)
    penalties = 0.05 * (BATCH.rollout_logp - BATCH.ref_logp) * MASK
    got = add_advantages(
        [sample(i) for i in range(N)],
        scores,
        AlgorithmConfig(advantage="rloo", kl_in="reward", kl="k1", kl_coef=0.05),
        penalties=[k[:n].astype(np.float32) for k, n in zip(penalties, LENGTHS, strict=True)],
    )
    np.testing.assert_allclose([s.advantages[0] for s in got], want.ravel(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale, factor", [(1.0, 0.9998), (1e-4, 0.5)])
def test_the_advantages_of_trl_are_smaller_by_its_larger_epsilon(scale, factor):
    rewards = scale * np.array([[0.0, 1.0, 0.0, 1.0]])
    std = rewards.std(ddof=1)
    theirs = (rewards - rewards.mean()) / (std + TRL_EPS)
    ours = grpo(rewards)
    np.testing.assert_allclose(theirs, ours * (std + 1e-6) / (std + TRL_EPS), rtol=1e-5)
    np.testing.assert_allclose(theirs[0, 1] / ours[0, 1], factor, rtol=0.3 * (scale < 1) + 1e-4)


@pytest.mark.parametrize(
    "aggregation, loss_type, counts_all",
    [
        ("token_mean", "dapo", False),
        ("seq_mean_token_mean", "grpo", True),
        ("seq_mean_token_sum_norm", "dr_grpo", True),
    ],
)
def test_overlong_filtering_by_sequence_means_counts_other_responses_than_trl(
    aggregation, loss_type, counts_all
):
    truncated = np.arange(N) % 3 == 0
    cfg = RunConfig(algorithm=AlgorithmConfig(overlong_filtering=True))
    samples = [dataclasses.replace(sample(i), truncated=bool(truncated[i])) for i in range(N)]
    assert len(drop_overlong(samples, cfg)) == N - truncated.sum()
    kept = ~truncated
    per_token = peers.ppo_clip(BATCH.logp, BATCH.logp, BATCH, 0.2, 0.2)
    ours = peers.AGGREGATIONS[aggregation](per_token[kept], MASK[kept], LONGEST)
    masked = dataclasses.replace(BATCH, mask=MASK * kept[:, None])
    theirs = trl_loss(BATCH.logp, masked, loss_type=loss_type)
    np.testing.assert_allclose(ours, theirs * (N / kept.sum() if counts_all else 1.0), rtol=1e-6)
