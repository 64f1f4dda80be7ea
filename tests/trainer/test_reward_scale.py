import dataclasses

import numpy as np
import pytest

from jaxrl.config.keys import RewardConfig
from jaxrl.trainer.reward_scale import RewardScale, rescaled
from jaxrl.types import Prompt, Rollout


def rollouts(*rewards, error="", baseline=0.0):
    tokens = np.zeros(1, np.int32)
    prompt = Prompt(id=0, messages=(), tokens=tokens, answer="")
    one = Rollout(prompt, 0, tokens, np.zeros(1, np.float32), 0, "stop", baseline=baseline)
    return [dataclasses.replace(one, reward=r, reward_error=error) for r in rewards]


def test_moments_of_steps_are_those_of_all_rewards_at_once():
    rewards = np.random.default_rng(0).normal(3.0, 2.0, 100)
    scale = RewardScale()
    for part in np.split(rewards, [1, 20, 21, 70]):
        scale = scale.after(rollouts(*part))
    assert scale.n == 100
    assert scale.mean == pytest.approx(rewards.mean(), rel=1e-12)
    assert scale.std == pytest.approx(rewards.std(), rel=1e-12)


def test_failed_rewards_do_not_count_and_equal_ones_have_deviation_one():
    scale = RewardScale().after(rollouts(2.0, 2.0)).after(rollouts(-100.0, error="hung"))
    assert (scale.n, scale.mean, scale.std) == (2, 2.0, 1.0)
    assert RewardScale().after([]) == RewardScale()


def test_rewards_and_baselines_are_normalised_then_cut():
    # of 1 and 5: mean 3, deviation 2; (1 - 3) / 2 = -1, (5 - 3) / 2 = 1 -> 0.5, (4 - 3) / 2 = 0.5
    scale = RewardScale().after(rollouts(1.0, 5.0))
    cfg = RewardConfig(normalize=True, clip=(-2.0, 0.5))
    found, metrics = rescaled(rollouts(1.0, 5.0, baseline=4.0), scale, cfg)
    assert [(r.reward, r.baseline) for r in found] == [(-1.0, 0.5), (0.5, 0.5)]
    assert metrics == {
        "reward/running_mean": 3.0,
        "reward/running_std": 2.0,
        "reward/clip_fraction": 0.5,
    }


def test_without_either_the_rewards_are_what_they_were():
    found, metrics = rescaled(
        rollouts(1.0, 5.0), RewardScale().after(rollouts(9.0)), RewardConfig()
    )
    assert [r.reward for r in found] == [1.0, 5.0] and metrics == {}
