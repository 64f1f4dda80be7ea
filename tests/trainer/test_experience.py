"""From rewards to mini-batches: advantages, idle groups, KL in the reward."""

import numpy as np
import pytest

from jaxrl.config import default_config, resolve
from jaxrl.trainer.experience import add_advantages, charge_kl, make_mini_batches, split_idle
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


def test_advantages_compare_the_samples_of_one_prompt():
    cfg = resolve(config(norm_adv_by_std=False))
    got = add_advantages(rollouts_with([[1, 0], [3, 3]]), cfg.algorithm, 2)
    assert [r.advantage for r in got] == [0.5, -0.5, 0.0, 0.0]


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


def test_kl_in_the_reward_is_charged_per_sequence():
    cfg = resolve(config(kl="k1", kl_in="reward", kl_coef=0.1))
    # the reference gives every token -1.5, the policy -1: k1 = 0.5 a token, 3 tokens, coefficient 0.1
    got, mean_kl = charge_kl(
        rollouts_with([[1, 0]]), cfg, 1, lambda batch: np.full(batch.tokens.shape, -1.5, np.float32)
    )
    np.testing.assert_allclose([r.reward for r in got], [1 - 0.15, 0 - 0.15], atol=1e-6)
    assert mean_kl == pytest.approx(0.5)


def test_scores_are_filled_only_where_asked_for():
    cfg = resolve(config())
    minis, _ = make_mini_batches(
        rollouts_with([[1, 0], [0, 1]]),
        cfg,
        n_ranks=1,
        score_old=lambda batch: np.full(batch.tokens.shape, -2.0, np.float32),
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
