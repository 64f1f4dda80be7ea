"""Tests of jaxrl/trainer/phases/mini_batches.py and advantage.py: from rewards to packed
mini-batches, with advantages, idle groups and the KL in the reward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.resolve import default_config, resolve
from jaxrl.data.packing import pack
from jaxrl.learner.policy_objective import without_rejected
from jaxrl.trainer.phases.advantage import add_advantages
from jaxrl.trainer.phases.mini_batches import (
    make_mini_batches,
    reference_kl,
    select_tokens,
    split_idle,
    with_scores,
)
from jaxrl.types import TrainingSample


def samples_of(n_prompts, n=2, n_tokens=3):
    """`n` samples per prompt; every logprob of the engine is -1."""
    return [
        TrainingSample(
            prompt_tokens=np.arange(5, dtype=np.int32),
            tokens=np.full(n_tokens, 7, np.int32),
            loss_mask=np.ones(n_tokens, bool),
            rollout_logp=np.full(n_tokens, -1.0, np.float32),
            group=p,
            prompt_id=p,
            sample=s,
        )
        for p in range(n_prompts)
        for s in range(n)
    ]


def rewarded(rewards):
    """(samples, rewards) for one row of `rewards` per prompt."""
    return samples_of(len(rewards), len(rewards[0])), np.array(rewards, float).reshape(-1)


def config(**algorithm):
    """Two prompts x two samples, with these keys of `algorithm`."""
    c = default_config()
    c.model.path, c.data.train = "model", ("task:addition",)
    c.data.prompts_per_step, c.rollout.n = 2, 2
    c.data.max_prompt_len = c.data.max_response_len = 32
    c.learner.token_budget = 64
    c.algorithm.update(algorithm)
    return c


def advantages_of(samples):
    """One advantage per response; it is the same at all tokens."""
    for s in samples:
        assert len(s.advantages) == len(s.tokens) and len(set(s.advantages.tolist())) == 1
    return [float(s.advantages[0]) for s in samples]


def test_advantages_are_relative_to_the_samples_of_the_same_prompt():
    cfg = resolve(config(norm_adv_by_std=False))
    got = add_advantages(*rewarded([[1, 0], [3, 3]]), cfg.algorithm)
    assert advantages_of(got) == [0.5, -0.5, 0.0, 0.0]


# rewards 3, 1 and 2, 2; every response has 3 tokens
EXPECTED = {
    "grpo": [0.5**0.5, -(0.5**0.5), 0, 0],  # (3 - 2) / sqrt(2)
    "dr_grpo": [1, -1, 0, 0],
    "rloo": [2, -2, 0, 0],  # 3 - 1
    "opo": [1, -1, 0, 0],  # equal lengths: the mean is the baseline
    "gpg": [2, -2, 0, 0],  # one group of two differs: times 2
    "grpo_passk": [2**0.5, 0, 0, 0],  # (3 - 1) / sqrt(2)
    "grpo_batch_std": [1.5**0.5, -(1.5**0.5), 0, 0],  # std of 3, 1, 2, 2: sqrt(2 / 3)
    "max_rl": [0.5, -0.5, 0, 0],  # (3 - 2) / 2
    "flash_reinforce": [1, -1, 0, 0],  # the mean of the step is 2
    # whiten 3 x (1, -1, 0, 0): mean 0, variance 6 / 11
    "reinforce_plus_plus_baseline": [(11 / 6) ** 0.5, -((11 / 6) ** 0.5), 0, 0],
    # whiten 3 x (3, 1, 2, 2): the same deviations from the mean 2
    "reinforce_plus_plus": [(11 / 6) ** 0.5, -((11 / 6) ** 0.5), 0, 0],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_estimator_gives_its_hand_calculated_advantages(name):
    cfg = resolve(config(advantage=name))
    got = add_advantages(*rewarded([[3, 1], [2, 2]]), cfg.algorithm)
    np.testing.assert_allclose(advantages_of(got), EXPECTED[name], atol=1e-5)


def test_remax_subtracts_the_reward_of_the_greedy_response():
    cfg = resolve(config(advantage="remax"))
    baselines = np.array([0.25, 0.25, 1.0, 1.0])  # one greedy response per prompt
    got = add_advantages(*rewarded([[1, 0], [1, 3]]), cfg.algorithm, baselines=baselines)
    assert advantages_of(got) == [0.75, -0.25, 0.0, 2.0]


def test_remax_has_the_kl_in_the_reward_as_reward_to_go():
    cfg = resolve(config(advantage="remax", kl_coef=0.5, kl_in="reward"))
    minis, _ = make_mini_batches(
        *rewarded([[1, 0]]),
        cfg,
        n_ranks=1,
        kl_reference=constant_scores(-1.5),
        baselines=np.array([0.25, 0.25]),
    )
    # k1 = -1 - -1.5 = 0.5 per token, times 0.5: 0.75, 0.5 and 0.25 from each token on
    got = [s.advantages for s in minis[0].samples]
    np.testing.assert_allclose(got, [[0, 0.25, 0.5], [-1, -0.75, -0.5]], atol=1e-6)


def test_the_kl_penalty_applies_to_the_response_or_to_its_tokens():
    some, kl = rewarded([[1, 1]]), [np.full(3, 0.1), np.full(3, 0.2)]
    cfg = resolve(config(advantage="dr_grpo"))
    # 1 - 0.3 and 1 - 0.6, mean 0.55
    got = add_advantages(*some, cfg.algorithm, penalties=kl)
    np.testing.assert_allclose(advantages_of(got), [0.15, -0.15], atol=1e-6)
    cfg = resolve(config(advantage="reinforce_plus_plus"))
    got = add_advantages(*some, cfg.algorithm, penalties=kl)
    # 1 minus the penalties from each token on: .7 .8 .9 and .4 .6 .8
    # mean .7, squared deviations .01 + .04 + .09 + .01 + .01
    returns = np.array([[0.7, 0.8, 0.9], [0.4, 0.6, 0.8]])
    std = (0.16 / 5) ** 0.5
    np.testing.assert_allclose([r.advantages for r in got], (returns - 0.7) / std, atol=1e-5)


def test_a_group_of_equal_rewards_is_not_trained_on_but_counted():
    cfg = resolve(config())
    minis, metrics = make_mini_batches(
        *rewarded([[1, 0], [3, 3]]),
        cfg,
        n_ranks=1,
    )
    assert len(minis) == 1
    assert [s.prompt_id for s in minis[0].idle] == [1, 1]
    assert metrics["perf/idle_fraction"] == 0.5
    # two sequences of three response tokens remain
    assert sum(p.batch.mask.sum() for p in minis[0].packed) == 6


@pytest.mark.parametrize(
    "algorithm",
    [
        {"entropy_coef": 0.1},
        {"kl_coef": 0.1, "kl_in": "loss"},
        {"rejection": "seq_mean_k1"},
        {"policy_loss": "dro", "log_ratio_penalty": 0.1, "old_logp": "rollout"},
    ],
)
def test_no_sample_is_idle_if_another_term_than_the_advantage_needs_it(algorithm):
    cfg = resolve(config(**algorithm))
    active, idle = split_idle(samples_of(1), cfg)
    assert len(active) == 2 and not idle


def test_the_kl_to_the_reference_is_per_token():
    cfg = resolve(config(kl="k1", kl_in="reward", kl_coef=0.1))
    # the reference gives every token -1.5, the policy -1: k1 = 0.5 a token
    kl = reference_kl(samples_of(1), cfg, 1, constant_scores(-1.5))
    np.testing.assert_allclose(kl, np.full((2, 3), 0.5), atol=1e-6)


def test_distillation_ignores_the_rewards():
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
    # the teacher gives every token -1.5, the student -1: every advantage is -2 * 0.5
    minis, metrics = make_mini_batches(
        *rewarded([[1, 0], [3, 3]]),
        cfg,
        n_ranks=1,
        kl_reference=constant_scores(-1.5),
    )
    for packed in minis[0].packed:
        np.testing.assert_allclose(packed.batch.advantages, -packed.batch.mask, atol=1e-6)
    np.testing.assert_allclose(metrics["reward/kl"], 0.5, atol=1e-6)


def constant_scores(logp):
    return lambda batches: [np.full(batch.tokens.shape, logp, np.float32) for batch in batches]


def filled(score):
    """Packed batches with old_logp from `score`."""

    def with_old_logp(batches):
        pairs = zip(batches, score(batches), strict=True)
        return [dataclasses.replace(batch, old_logp=logp) for batch, logp in pairs]

    return with_old_logp


def test_only_configured_scorers_fill_their_fields():
    cfg = resolve(config())
    minis, _ = make_mini_batches(
        *rewarded([[1, 0], [0, 1]]),
        cfg,
        n_ranks=1,
    )
    batch = (
        with_scores(minis, cfg.algorithm, score_old=filled(constant_scores(-2.0)))[0]
        .packed[0]
        .batch
    )
    assert (batch.old_logp == -2.0).all() and (batch.ref_logp == 0.0).all()


def test_mini_batches_split_the_prompts_in_order():
    c = config()
    c.learner.mini_batch_prompts = 1
    minis, _ = make_mini_batches(
        *rewarded([[1, 0], [0, 1]]),
        resolve(c),
        n_ranks=1,
    )
    assert len(minis) == 2
    batches = [p.batch for p in minis[0].packed]
    advantages = np.concatenate([b.advantages[b.mask > 0] for b in batches])
    # rewards 1 and 0: mean 1/2, std 1/sqrt(2), so +-sqrt(1/2)
    np.testing.assert_allclose(np.sort(np.unique(advantages)), [-(0.5**0.5), 0.5**0.5], rtol=1e-5)


def with_observations(sample, loss_mask):
    """The sample with observation tokens where `loss_mask` is 0; their logp is 0."""
    mask = np.array(loss_mask, bool)
    logp = np.where(mask, sample.rollout_logp[0], 0).astype(np.float32)
    tokens = np.full(len(mask), 7, np.int32)
    return dataclasses.replace(sample, tokens=tokens, rollout_logp=logp, loss_mask=mask)


def episodes():
    """Four responses with 2, 1, 3 and 3 loss tokens and observations between them; rewards."""
    masks = ([1, 0, 0, 1], [0, 1], [1, 1, 1], [1, 1, 0, 1])
    samples, rewards = rewarded([[3, 1], [2, 2]])
    return [with_observations(s, mask) for s, mask in zip(samples, masks, strict=True)], rewards


@pytest.mark.parametrize("name", EXPECTED)
def test_observation_tokens_have_no_advantage_and_do_not_change_others(name):
    cfg = resolve(config(advantage=name))
    samples, rewards = episodes()
    got = add_advantages(samples, rewards, cfg.algorithm)
    alone = [
        dataclasses.replace(
            s,
            tokens=s.tokens[s.loss_mask],
            rollout_logp=s.rollout_logp[s.loss_mask],
            loss_mask=s.loss_mask[s.loss_mask],
        )
        for s in samples
    ]
    want = add_advantages(alone, rewards, cfg.algorithm)
    for s, plain in zip(got, want, strict=True):
        assert not s.advantages[~s.loss_mask].any()
        np.testing.assert_array_equal(s.advantages[s.loss_mask], plain.advantages)


def with_turns(sample, turn_rewards):
    return dataclasses.replace(sample, turn_rewards=np.array(turn_rewards, np.float32))


def one_episode():
    """A reward of 3, of which 2 are for the first turn, which ends with the second loss token."""
    sample = with_turns(with_observations(samples_of(1, 1)[0], [1, 1, 0, 1]), [0, 2, 0, 0])
    return dataclasses.replace(sample, values=np.zeros(4, np.float32)), np.array([3.0])


def test_gae_has_the_reward_of_a_turn_at_its_end():
    cfg = resolve(config(advantage="gae", gamma=0.5, lam=0.5))
    sample, rewards = one_episode()
    [got] = add_advantages([sample], rewards, cfg.algorithm)
    # rewards 0, 2, 1, values 0, gamma lambda = 1/4: 1, 2 + 1/4, 2.25 / 4
    np.testing.assert_allclose(got.returns, [0.5625, 2.25, 0, 1], rtol=1e-6)


def test_reinforce_plus_plus_has_the_reward_of_a_turn_at_its_end():
    cfg = resolve(config(advantage="reinforce_plus_plus", gamma=0.5))
    sample, rewards = one_episode()
    [got] = add_advantages([sample], rewards, cfg.algorithm)
    # returns 1, 2 + 1/2, 2.5 / 2: mean 19/12, squared deviations (16 + 121 + 49) / 144 over 2
    want = (np.array([1.25, 2.5, 1]) - 19 / 12) / (186 / 144 / 2) ** 0.5
    np.testing.assert_allclose(got.advantages[got.loss_mask], want, rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in EXPECTED if n != "reinforce_plus_plus"])
def test_estimators_of_responses_use_the_sum_over_turns(name):
    cfg = resolve(config(advantage=name))
    samples, rewards = episodes()
    turns = [with_turns(s, np.where(s.loss_mask, 0.5, 0)) for s in samples]
    got = add_advantages(turns, rewards, cfg.algorithm)
    want = add_advantages(samples, rewards, cfg.algorithm)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.advantages, other.advantages)


def test_opo_weights_by_the_number_of_loss_tokens():
    got = add_advantages(*episodes(), resolve(config(advantage="opo")).algorithm)
    # lengths 2 and 1, rewards 3 and 1: the baseline is (2 * 3 + 1) / 3 = 7 / 3
    np.testing.assert_allclose(got[0].advantages, [2 / 3, 0, 0, 2 / 3], atol=1e-6)
    np.testing.assert_allclose(got[1].advantages, [0, -4 / 3], atol=1e-6)


def test_observation_tokens_have_no_kl_penalty():
    cfg = resolve(config(kl="k1", kl_coef=0.1, kl_in="reward", norm_adv_by_std=False))
    half = functools.partial(map, lambda b: np.full(b.tokens.shape, -1.5, np.float32))
    kl = reference_kl(episodes()[0], cfg, 1, lambda batches: list(half(batches)))
    # k1 = -1 - -1.5 at loss tokens, 0 at observation tokens
    np.testing.assert_allclose(kl[0], [0.5, 0, 0, 0.5])
    _, metrics = make_mini_batches(
        *episodes(), cfg, n_ranks=1, kl_reference=lambda batches: list(half(batches))
    )
    assert metrics["reward/kl"] == pytest.approx(0.5)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_covariance_selection_ignores_observation_tokens(loss):
    cfg = resolve(
        config(
            policy_loss=loss,
            cov_fraction=1.0,
            clip_cov_low=-100.0,
            clip_cov_high=100.0,
            old_logp="recompute",
        )
    )
    some = add_advantages(*episodes(), cfg.algorithm)
    for r in select_tokens(some, cfg.algorithm, np.random.default_rng(0)):
        np.testing.assert_array_equal(r.selected, r.loss_mask)


def test_a_response_without_loss_tokens_is_idle_for_every_loss():
    some = [with_observations(s, []) for s in samples_of(2)]
    cfg = resolve(config(kl_coef=0.1))
    rewards = np.array([1.0, 0.0, 1.0, 0.0])
    active, idle = split_idle(add_advantages(some, rewards, cfg.algorithm), cfg)
    assert not active and len(idle) == 4


@pytest.mark.parametrize("token_budget", [64, 256])
def test_the_largest_entropies_are_those_of_all_micro_batches(token_budget):
    """Entropies 0, .5, 1, ..., 5.5 of 12 tokens: the upper quarter is 4.5, 5 and 5.5."""
    c = config(top_entropy=0.25)
    c.learner.token_budget = token_budget
    cfg = resolve(c)
    minis, _ = make_mini_batches(*rewarded([[1, 0], [1, 1]]), cfg, n_ranks=1)

    def score_old(batches):
        scored, n = [], 0
        for batch in batches:
            entropies = np.full(batch.mask.shape, 99.0, np.float32)  # outside of the loss
            of_batch = int(batch.mask.sum())
            entropies[batch.mask > 0] = 0.5 * np.arange(n, n + of_batch)
            scored.append(batch.replace(selected=entropies))
            n += of_batch
        assert n == 12  # also the tokens of the group of equal rewards
        return scored

    [mini] = with_scores(minis, cfg.algorithm, score_old=score_old)
    assert len(mini.packed) == (4 if token_budget == 64 else 1)
    chosen = np.concatenate([p.batch.selected[p.batch.mask > 0] for p in mini.packed])
    # the quantile .75 of 0, ..., 5.5 is 4.125
    np.testing.assert_array_equal(chosen, [0] * 9 + [1] * 3)
    assert sum(p.batch.selected.sum() for p in mini.packed) == 3


@pytest.mark.parametrize("token_budget", [64, 256])
def test_the_mean_weight_is_over_all_micro_batches(token_budget):
    """Ratios 2 and 1/2 by turns, truncated at 1.5."""
    c = config(correction="token_tis", correction_high=1.5, correction_normalize=True)
    c.learner.token_budget = token_budget
    cfg = resolve(c)

    def old_logps(batches):
        ratio = np.log(np.where(np.arange(64) % 2, 2.0, 0.5)).astype(np.float32)
        return [b.behavior_logp + np.resize(ratio, b.tokens.shape) for b in batches]

    samples, rewards = rewarded([[1, 0], [0, 1]])  # sampled under filters, which raise logprobs
    filtered = [dataclasses.replace(s, behavior_logp=np.full(3, -0.5, np.float32)) for s in samples]
    minis, _ = make_mini_batches(filtered, rewards, cfg, n_ranks=1)
    [mini] = with_scores(minis, cfg.algorithm, score_old=filled(old_logps))
    assert len(mini.packed) == (4 if token_budget == 64 else 1)
    masks = np.concatenate([p.batch.mask.ravel() for p in mini.packed]) > 0
    ratio = np.concatenate(
        [np.exp(p.batch.old_logp - p.batch.behavior_logp).ravel() for p in mini.packed]
    )
    want = np.minimum(ratio[masks], 1.5).mean()
    assert want != 1
    assert mini.mean_weight == pytest.approx(want, rel=1e-6)


def test_the_kl_in_the_reward_is_clamped_and_counted():
    cfg = resolve(config(kl_in="reward", kl_coef=1.0, kl_clamp=0.5))

    def ref_logps(batches):  # the engine's logprobs are -1: KL estimates 0.25 and 2
        return [np.where(b.positions % 2, -1.25, -3.0).astype(np.float32) for b in batches]

    _, metrics = make_mini_batches(
        *rewarded([[1, 0], [0, 1]]), cfg, n_ranks=1, kl_reference=ref_logps
    )
    # three tokens per response at positions 4, 5, 6: 2, 0.25, 2
    assert metrics["reward/kl_clamped_fraction"] == pytest.approx(2 / 3)
    assert metrics["reward/kl"] == pytest.approx((0.5 + 0.25 + 0.5) / 3, rel=1e-6)


def with_branch(samples):
    """The samples, the first as an episode of two samples with 3 and 1 loss tokens."""
    first = samples[0]
    short = {name: getattr(first, name)[:1] for name in ("tokens", "loss_mask", "rollout_logp")}
    both = [first, dataclasses.replace(first, branch=1, **short)]
    return [dataclasses.replace(s, episode_loss_tokens=4) for s in both] + samples[1:]


def test_the_branches_of_an_episode_are_one_member_of_their_group():
    cfg = resolve(config(norm_adv_by_std=False))
    samples, _ = rewarded([[1, 0], [3, 3]])
    # the mean is that of two episodes, not of three samples
    got = add_advantages(with_branch(samples), np.array([1.0, 1, 0, 3, 3]), cfg.algorithm)
    assert advantages_of(got) == [0.5, 0.5, -0.5, 0.0, 0.0]


def test_the_kl_penalty_of_an_episode_is_that_of_all_its_branches():
    samples, _ = rewarded([[1, 1]])
    kl = [np.full(3, 0.1), np.full(1, 0.3), np.full(3, 0.2)]
    cfg = resolve(config(advantage="dr_grpo"))
    got = add_advantages(with_branch(samples), np.ones(3), cfg.algorithm, penalties=kl)
    np.testing.assert_allclose(advantages_of(got), [0, 0, 0], atol=1e-6)  # both 1 - 0.6


def test_an_episode_with_branches_counts_as_one_sequence():
    samples, _ = rewarded([[1, 0]])
    samples = with_branch(samples)
    assert [s.share for s in samples] == [0.75, 0.25, 1.0]
    (micro,) = pack(samples, shapes=[(1, 64)], align=8, n_ranks=1)
    batch = micro.batch
    np.testing.assert_allclose((batch.mask / batch.response_len).sum(), 2)  # episodes
    # rejecting a token of the branch with 3 leaves 2 of 3 of its share
    rejected = np.ones(batch.mask.shape, np.float32)
    span = next(s for s in micro.spans if s.item == 0)
    rejected[span.row, span.start] = 0
    left = without_rejected(jax.tree.map(jnp.asarray, batch), jnp.asarray(rejected))
    np.testing.assert_allclose((left.mask / left.response_len).sum(), 2)
