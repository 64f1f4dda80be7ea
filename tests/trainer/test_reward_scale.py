import numpy as np
import pytest

from jaxrl.config.keys import RewardConfig
from jaxrl.trainer.shaping import RewardScale, scale_metrics, scaled_rewards
from jaxrl.types import Reward


def rewards_of(*values, error=""):
    return [Reward(value, error=error) for value in values]


def test_moments_of_steps_are_those_of_all_rewards_at_once():
    rewards = np.random.default_rng(0).normal(3.0, 2.0, 100)
    scale = RewardScale()
    for part in np.split(rewards, [1, 20, 21, 70]):
        scale = scale.updated(rewards_of(*part))
    assert scale.n == 100
    assert scale.mean == pytest.approx(rewards.mean(), rel=1e-12)
    assert scale.std == pytest.approx(rewards.std(), rel=1e-12)


def test_failed_rewards_do_not_count_and_equal_ones_have_deviation_one():
    scale = RewardScale().updated(rewards_of(2.0, 2.0))
    scale = scale.updated(rewards_of(-100.0, error="hung"))
    assert (scale.n, scale.mean, scale.std) == (2, 2.0, 1.0)
    assert RewardScale().updated([]) == RewardScale()


def test_rewards_and_baselines_are_normalised_then_cut():
    # of 1 and 5: mean 3, deviation 2; (1 - 3) / 2 = -1, (5 - 3) / 2 = 1 -> 0.5, (4 - 3) / 2 = 0.5
    scale = RewardScale().updated(rewards_of(1.0, 5.0))
    cfg = RewardConfig(normalize=True, clip=(-2.0, 0.5))
    rewards, baselines = np.array([1.0, 5.0]), np.array([4.0])
    assert scaled_rewards(rewards, scale, cfg).tolist() == [-1.0, 0.5]
    assert scaled_rewards(baselines, scale, cfg).tolist() == [0.5]
    assert scale_metrics(rewards, scale, cfg) == {
        "reward/running_mean": 3.0,
        "reward/running_std": 2.0,
        "reward/clip_fraction": 0.5,
    }


def test_without_either_the_rewards_are_what_they_were():
    rewards, scale = np.array([1.0, 5.0]), RewardScale().updated(rewards_of(9.0))
    assert scaled_rewards(rewards, scale, RewardConfig()).tolist() == [1.0, 5.0]
    assert scale_metrics(rewards, scale, RewardConfig()) == {}
