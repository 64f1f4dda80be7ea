"""From rewards to mini-batches: advantages, idle groups, KL in the reward."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxrl.config.resolve import default_config, resolve
from jaxrl.trainer.advantage import add_advantages
from jaxrl.trainer.experience import make_mini_batches, reference_kl, select_tokens, split_idle
from jaxrl.types import Prompt, Rollout


def rollouts_with(rewards, n_tokens=3):
    """One row of `rewards` per prompt; every logp of the engine is -1."""
    return [
        Rollout(
            prompt=Prompt(p, (), np.arange(5, dtype=np.int32), "4"),
            sample=s,
            tokens=np.full(n_tokens, 7, np.int32),
            logp=np.full(n_tokens, -1.0, np.float32),
            version=0,
            finish="stop",
            reward=float(reward),
        )
        for p, group in enumerate(rewards)
        for s, reward in enumerate(group)
    ]


def config(**algorithm):
    c = default_config()
    c.model.path, c.data.train = "model", ("task:addition",)
    c.data.prompts_per_step, c.rollout.n = 2, 2
    c.data.max_prompt_len = c.data.max_response_len = 32
    c.learner.token_budget = 64
    c.algorithm.update(algorithm)
    return c


def advantages_of(rollouts):
    """The advantage of each response, the same at all of its tokens."""
    for r in rollouts:
        assert len(r.advantages) == len(r.tokens) and len(set(r.advantages.tolist())) == 1
    return [float(r.advantages[0]) for r in rollouts]


def test_advantages_compare_the_samples_of_one_prompt():
    cfg = resolve(config(norm_adv_by_std=False))
    got = add_advantages(rollouts_with([[1, 0], [3, 3]]), cfg.algorithm, 2)
    assert advantages_of(got) == [0.5, -0.5, 0.0, 0.0]


# rewards 3, 1 and 2, 2, each response of 3 tokens
EXPECTED = {
    "grpo": [0.5**0.5, -(0.5**0.5), 0, 0],  # (3 - 2) / sqrt(2)
    "dr_grpo": [1, -1, 0, 0],
    "rloo": [2, -2, 0, 0],  # 3 - 1
    "opo": [1, -1, 0, 0],  # equal lengths: the mean is the baseline
    "gpg": [2, -2, 0, 0],  # one group of two differs: times 2
    "grpo_passk": [2**0.5, 0, 0, 0],  # (3 - 1) / sqrt(2)
    # whiten 3 x (1, -1, 0, 0): mean 0, variance 6 / 11
    "reinforce_plus_plus_baseline": [(11 / 6) ** 0.5, -((11 / 6) ** 0.5), 0, 0],
    # whiten 3 x (3, 1, 2, 2): the same around the mean 2
    "reinforce_plus_plus": [(11 / 6) ** 0.5, -((11 / 6) ** 0.5), 0, 0],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_estimator_can_be_chosen(name):
    cfg = resolve(config(advantage=name))
    got = add_advantages(rollouts_with([[3, 1], [2, 2]]), cfg.algorithm, 2)
    np.testing.assert_allclose(advantages_of(got), EXPECTED[name], atol=1e-5)


def test_remax_compares_with_the_greedy_response():
    c = config(advantage="remax")
    c.rollout.n = 1
    some = [dataclasses.replace(r, baseline=0.25) for r in rollouts_with([[1], [0]])]
    assert advantages_of(add_advantages(some, resolve(c).algorithm, 1)) == [0.75, -0.25]


def test_the_kl_in_the_reward_is_charged_to_the_response_or_to_its_tokens():
    some, kl = rollouts_with([[1, 1]]), [np.full(3, 0.1), np.full(3, 0.2)]
    cfg = resolve(config(advantage="dr_grpo"))
    # 1 - 0.3 and 1 - 0.6, mean 0.55
    got = add_advantages(some, cfg.algorithm, 2, kl)
    np.testing.assert_allclose(advantages_of(got), [0.15, -0.15], atol=1e-6)
    cfg = resolve(config(advantage="reinforce_plus_plus"))
    got = add_advantages(some, cfg.algorithm, 2, kl)
    # 1 minus what is still to be charged: .7 .8 .9 and .4 .6 .8; mean .7, squares .01 + .04 + .09 + .01 + .01
    returns = np.array([[0.7, 0.8, 0.9], [0.4, 0.6, 0.8]])
    std = (0.16 / 5) ** 0.5
    np.testing.assert_allclose([r.advantages for r in got], (returns - 0.7) / std, atol=1e-5)


def test_a_group_of_equal_rewards_is_left_out_but_counted():
    cfg = resolve(config())
    minis, metrics = make_mini_batches(
        rollouts_with([[1, 0], [3, 3]]), cfg, n_ranks=1, score_old=None, score_ref=None
    )
    assert len(minis) == 1
    assert [r.reward for r in minis[0].idle] == [3, 3]
    assert metrics["perf/idle_fraction"] == 0.5
    # two sequences of three response tokens are left to train on
    assert sum(p.batch.mask.sum() for p in minis[0].packed) == 6


@pytest.mark.parametrize("algorithm", [{"entropy_coef": 0.1}, {"kl_coef": 0.1, "kl_in": "loss"}])
def test_nothing_is_idle_where_entropy_or_kl_learns_from_every_token(algorithm):
    cfg = resolve(config(**algorithm))
    active, idle = split_idle(rollouts_with([[3, 3]]), cfg)
    assert len(active) == 2 and not idle


def test_the_kl_to_the_reference_is_that_of_every_token():
    cfg = resolve(config(kl="k1", kl_in="reward", kl_coef=0.1))
    # the reference gives every token -1.5, the policy -1: k1 = 0.5 a token
    kl = reference_kl(rollouts_with([[1, 0]]), cfg, 1, constant_scores(-1.5))
    np.testing.assert_allclose(kl, np.full((2, 3), 0.5), atol=1e-6)


def test_a_student_is_moved_by_its_teacher_alone():
    cfg = resolve(
        config(
            advantage="distill",
            teacher="big",
            kl="k1",
            kl_in="reward",
            kl_coef=2.0,
            gamma=0.0,
        )
    )
    # the teacher gives every token -1.5, the student -1: each is pushed down by 2 * 0.5, whatever the rewards
    minis, metrics = make_mini_batches(
        rollouts_with([[1, 0], [3, 3]]),
        cfg,
        n_ranks=1,
        score_old=None,
        score_ref=constant_scores(-1.5),
    )
    for packed in minis[0].packed:
        np.testing.assert_allclose(packed.batch.advantages, -packed.batch.mask, atol=1e-6)
    np.testing.assert_allclose(metrics["reward/kl"], 0.5, atol=1e-6)


def constant_scores(logp):
    return lambda batches: [np.full(batch.tokens.shape, logp, np.float32) for batch in batches]


def test_scores_are_filled_only_where_asked_for():
    cfg = resolve(config())
    minis, _ = make_mini_batches(
        rollouts_with([[1, 0], [0, 1]]),
        cfg,
        n_ranks=1,
        score_old=constant_scores(-2.0),
        score_ref=None,
    )
    batch = minis[0].packed[0].batch
    assert (batch.old_logp == -2.0).all() and (batch.ref_logp == 0.0).all()


def test_mini_batches_split_the_prompts_in_order():
    c = config()
    c.learner.mini_batch_prompts = 1
    minis, _ = make_mini_batches(
        rollouts_with([[1, 0], [0, 1]]), resolve(c), n_ranks=1, score_old=None, score_ref=None
    )
    assert len(minis) == 2
    batches = [p.batch for p in minis[0].packed]
    advantages = np.concatenate([b.advantages[b.mask > 0] for b in batches])
    # rewards 1 and 0: mean 1/2, std 1/sqrt(2), so +-sqrt(1/2)
    np.testing.assert_allclose(np.sort(np.unique(advantages)), [-(0.5**0.5), 0.5**0.5], rtol=1e-5)


def with_reply(rollout, own):
    """The rollout with tokens that the model did not write where `own` is 0; their logp is 0."""
    own = np.array(own, bool)
    logp = np.where(own, rollout.logp[0], 0).astype(np.float32)
    return dataclasses.replace(rollout, tokens=np.full(len(own), 7, np.int32), logp=logp, own=own)


def episodes():
    """Four responses of 2, 1, 3 and 3 own tokens with replies between or behind them."""
    masks = ([1, 0, 0, 1], [0, 1], [1, 1, 1], [1, 1, 0, 1])
    some = rollouts_with([[3, 1], [2, 2]])
    return [with_reply(r, own) for r, own in zip(some, masks, strict=True)]


@pytest.mark.parametrize("name", EXPECTED)
def test_replies_have_no_advantage_and_count_for_nobody(name):
    cfg = resolve(config(advantage=name))
    got = add_advantages(episodes(), cfg.algorithm, 2)
    alone = [
        dataclasses.replace(r, tokens=r.tokens[r.own], logp=r.logp[r.own], own=None)
        for r in episodes()
    ]
    want = add_advantages(alone, cfg.algorithm, 2)
    for r, plain in zip(got, want, strict=True):
        assert not r.advantages[~r.own].any()
        np.testing.assert_array_equal(r.advantages[r.own], plain.advantages)


def test_opo_weighs_by_the_tokens_that_the_model_wrote():
    got = add_advantages(episodes(), resolve(config(advantage="opo")).algorithm, 2)
    # lengths 2 and 1, rewards 3 and 1: the baseline is (2 * 3 + 1) / 3 = 7 / 3
    np.testing.assert_allclose(got[0].advantages, [2 / 3, 0, 0, 2 / 3], atol=1e-6)
    np.testing.assert_allclose(got[1].advantages, [0, -4 / 3], atol=1e-6)


def test_replies_are_not_charged_for_the_kl():
    cfg = resolve(config(kl="k1", kl_coef=0.1, kl_in="reward", norm_adv_by_std=False))
    half = functools.partial(map, lambda b: np.full(b.tokens.shape, -1.5, np.float32))
    kl = reference_kl(episodes(), cfg, 1, lambda batches: list(half(batches)))
    # k1 = -1 - -1.5 where the model wrote, whatever stands between
    np.testing.assert_allclose(kl[0], [0.5, 0, 0, 0.5])
    _, metrics = make_mini_batches(
        episodes(), cfg, n_ranks=1, score_old=None, score_ref=lambda batches: list(half(batches))
    )
    assert metrics["reward/kl"] == pytest.approx(0.5)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_no_token_of_a_reply_is_singled_out(loss):
    cfg = resolve(
        config(
            policy_loss=loss,
            cov_fraction=1.0,
            clip_cov_low=-100.0,
            clip_cov_high=100.0,
            old_logp="recompute",
        )
    )
    some = add_advantages(episodes(), cfg.algorithm, 2)
    for r in select_tokens(some, cfg.algorithm, np.random.default_rng(0)):
        np.testing.assert_array_equal(r.selected, r.own)


def test_a_response_without_a_token_of_the_model_is_idle_whatever_is_learnt():
    some = [with_reply(r, []) for r in rollouts_with([[1, 0], [1, 0]])]
    cfg = resolve(config(kl_coef=0.1))
    active, idle = split_idle(add_advantages(some, cfg.algorithm, 2), cfg)
    assert not active and len(idle) == 4
