"""Tests of jaxrl/trainer/phases/rewards.py: flat groups, solved prompts, overlong, scale."""

import dataclasses

import numpy as np
import pytest

from jaxrl.config.keys import RewardConfig, RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.data.iterator import solved
from jaxrl.trainer.phases.mini_batches import drop_overlong, make_mini_batches
from jaxrl.trainer.phases.rewards import (
    RewardScale,
    add_length_penalties,
    prompt_outcomes,
    scale_metrics,
    scaled_rewards,
    split_flat,
    split_groups,
    turn_rewards,
    valid_groups,
)
from jaxrl.types import Episode, Prompt, Reward, Rollout, ScoredRollout
from tests.trainer.phases.test_mini_batches import config, rewarded


def rollouts_with(rewards, length=3):
    """Scored rollouts: one row of `rewards` per prompt."""
    tokens, logp = np.full(length, 7, np.int32), np.zeros(length, np.float32)
    messages = ({"role": "user", "content": "2 + 2"},)
    return [
        ScoredRollout(
            Rollout(Prompt(p, messages, tokens, "4"), s, tokens, logp, logp == 0, tokens, "stop"),
            Reward(float(reward)),
        )
        for p, group in enumerate(rewards)
        for s, reward in enumerate(group)
    ]


def ids(groups):
    return [group[0].rollout.prompt.id for group in groups]


def test_a_group_of_equal_rewards_is_flat():
    differ, flat = split_flat(split_groups(rollouts_with([[1, 0], [3, 3], [0, 0], [2, 1]]), 2))
    assert ids(differ) == [0, 3] and ids(flat) == [1, 2]


def test_groups_outside_the_mean_range_are_dropped():
    groups = split_groups(rollouts_with([[1, 0], [1, 0.9], [1, 1], [0.1, 0]]), 2)
    kept, dropped = split_flat(groups, mean_range=(0.1, 0.9))
    assert ids(kept) == [0] and ids(dropped) == [1, 2, 3]


def test_failed_samples_leave_their_group_and_too_small_a_group_is_empty():
    groups = [
        [*rewards_of(1.0, 0.0), *rewards_of(9.0, error="f: KeyError: 'x'")],
        [*rewards_of(1.0), with_episode((), error="the process died")],
        rewards_of(1.0, 1.0, error="hung"),
    ]
    got = valid_groups(groups, resolve(config()))
    assert [[r.reward.value for r in group] for group in got] == [[1.0, 0.0], [], []]
    got = valid_groups(groups, resolve(config(advantage="reinforce_plus_plus")))
    assert [[r.reward.value for r in group] for group in got] == [[1.0, 0.0], [1.0], []]
    c = config()
    c.reward.on_error = "value"
    assert valid_groups(groups, resolve(c)) == groups


def test_empty_groups_are_flat_and_have_no_outcome():
    assert split_flat([[]], mean_range=(0.1, 0.9)) == ([], [[]])
    assert prompt_outcomes([[], rewards_of(1.0)]) == [(0, 1.0)]


def test_a_prompt_is_solved_if_its_mean_reward_reaches_the_pass_rate():
    groups = split_groups(rollouts_with([[1, 0], [1, 1], [0, 0]]), 2)
    outcomes = prompt_outcomes(groups)
    assert outcomes == [(0, 0.5), (1, 1.0), (2, 0.0)]
    assert solved(outcomes, 0.5) == [0, 1]
    assert solved(outcomes, 1.0) == [1]


def rewards_of(*values, error=""):
    """One rollout per reward."""
    scored = rollouts_with([values])
    failed = [dataclasses.replace(r, reward=Reward(r.reward.value, error=error)) for r in scored]
    return failed if error else scored


def with_rewards(**fields):
    return RunConfig(reward=RewardConfig(**fields))


def with_episode(steps, *, error="", reward_error=""):
    """A rollout of six tokens with an episode of these rewards."""
    [scored] = rollouts_with([[1]], length=6)
    rollout = dataclasses.replace(scored.rollout, episode=Episode(step_rewards=steps, error=error))
    return ScoredRollout(rollout, dataclasses.replace(scored.reward, error=reward_error))


def test_rewards_of_turns_have_the_weight_and_scale_of_the_whole_reward():
    cfg = with_rewards(functions=("math", "environment"), weights=(1.0, 0.5), normalize=True)
    scale = RewardScale().updated(rewards_of(1.0, 5.0))  # deviation 2
    got = turn_rewards(with_episode(((2, 4.0), (6, -2.0))), scale, cfg)
    assert got.tolist() == [0, 1, 0, 0, 0, -0.5]  # 4 * 0.5 / 2, -2 * 0.5 / 2
    plain = with_rewards(functions=("math", "environment"))
    assert turn_rewards(with_episode(((2, 4.0),)), scale, plain).tolist() == [0, 4, 0, 0, 0, 0]


def test_only_a_valid_reward_of_the_environment_is_split_into_turns():
    scale, steps = RewardScale(), ((2, 4.0),)
    environment = with_rewards(functions=("environment",))
    assert turn_rewards(with_episode(steps), scale, with_rewards(functions=("math",))) is None
    assert turn_rewards(rollouts_with([[1]])[0], scale, environment) is None
    assert turn_rewards(with_episode(steps, error="died"), scale, environment) is None
    assert turn_rewards(with_episode(steps, reward_error="hung"), scale, environment) is None


def rollouts_of_lengths(lengths):
    """One rollout with reward 1 per response length."""
    return [r for length in lengths for r in rollouts_with([[1]], length)]


def test_the_overlong_penalty_is_subtracted_and_logged():
    c = config()
    c.reward.overlong_buffer, c.reward.overlong_penalty = 8, 0.5
    # max_response_len 32, buffer 8: no penalty up to 24, half of 0.5 at 28, 0.5 at 32
    got = add_length_penalties(rollouts_of_lengths([24, 28, 32]), resolve(c))
    np.testing.assert_allclose([r.reward.value for r in got], [1, 0.75, 0.5])
    assert [r.reward.parts for r in got][1] == {"overlong": -0.25}
    assert add_length_penalties(rollouts_of_lengths([32]), resolve(config()))[0].reward.value == 1


def test_truncated_responses_lose_a_share_of_what_the_overlong_penalty_left():
    c = config()
    c.reward.overlong_buffer, c.reward.truncated_coef = 8, 0.2
    first, second = rollouts_of_lengths([28, 28])
    cut = dataclasses.replace(second, rollout=dataclasses.replace(second.rollout, finish="length"))
    got = add_length_penalties([first, cut], resolve(c))
    # 1 - 0.5, and 0.2 of it: 0.4 less
    np.testing.assert_allclose([r.reward.value for r in got], [0.5, 0.1])
    assert got[1].reward.parts == {"overlong": -0.5, "truncated": pytest.approx(-0.4)}


def test_the_length_penalty_compares_the_valid_samples_of_a_prompt():
    c = config()
    c.reward.length_penalty = 0.4
    short, long, failed = rollouts_of_lengths([8, 16, 32])
    failed = dataclasses.replace(failed, reward=dataclasses.replace(failed.reward, error="hung"))
    got = add_length_penalties([short, failed, long], resolve(c))
    # pass rate 1: 0.4 * 8 / 16 and 0.4; the failed one is not compared
    np.testing.assert_allclose([r.reward.value for r in got], [0.8, 1, 0.6])
    assert got[0].reward.parts == {"length": pytest.approx(-0.2)} and not got[1].reward.parts


def test_overlong_filtering_masks_truncated_responses_but_keeps_them_in_the_baseline():
    some, rewards = rewarded([[1, 0], [1, 0]])
    some[1] = dataclasses.replace(some[1], truncated=True)
    cfg = resolve(config(overlong_filtering=True, advantage="dr_grpo"))
    assert len(drop_overlong(some, cfg)) == 3
    assert len(drop_overlong(some, resolve(config()))) == 4
    minis, _ = make_mini_batches(some, rewards, cfg, n_ranks=1)
    batches = [p.batch for p in minis[0].packed]
    assert sum(b.mask.sum() for b in batches) == 9 and not minis[0].idle
    # the baseline of the first group is still the mean of both
    advantages = np.concatenate([b.advantages[b.mask > 0] for b in batches])
    np.testing.assert_allclose(np.sort(advantages), [-0.5] * 3 + [0.5] * 6)


def test_moments_updated_per_step_equal_those_of_all_rewards():
    rewards = np.random.default_rng(0).normal(3.0, 2.0, 100)
    scale = RewardScale()
    for part in np.split(rewards, [1, 20, 21, 70]):
        scale = scale.updated(rewards_of(*part))
    assert scale.n == 100
    assert scale.mean == pytest.approx(rewards.mean(), rel=1e-12)
    assert scale.std == pytest.approx(rewards.std(), rel=1e-12)


def test_failed_rewards_are_not_counted_and_equal_ones_have_deviation_one():
    scale = RewardScale().updated(rewards_of(2.0, 2.0))
    scale = scale.updated(rewards_of(-100.0, error="hung"))
    assert (scale.n, scale.mean, scale.std) == (2, 2.0, 1.0)
    assert RewardScale().updated([]) == RewardScale()


def test_rewards_and_baselines_are_normalized_then_clipped():
    # rewards 1 and 5: mean 3, deviation 2
    # (1 - 3) / 2 = -1, (5 - 3) / 2 = 1 -> 0.5, (4 - 3) / 2 = 0.5
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


def test_rewards_are_unchanged_without_normalization_and_clipping():
    rewards, scale = np.array([1.0, 5.0]), RewardScale().updated(rewards_of(9.0))
    assert scaled_rewards(rewards, scale, RewardConfig()).tolist() == [1.0, 5.0]
    assert scale_metrics(rewards, scale, RewardConfig()) == {}
