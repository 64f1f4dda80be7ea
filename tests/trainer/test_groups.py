"""Groups that teach nothing, prompts that are solved, responses that are too long."""

import dataclasses

import numpy as np

from jaxrl.config.resolve import resolve
from jaxrl.trainer.mini_batches import make_mini_batches, without_overlong
from jaxrl.trainer.shaping import (
    add_overlong_penalty,
    solved_prompts,
    split_flat,
    split_groups,
)
from jaxrl.types import Prompt, Reward, Rollout, ScoredRollout
from tests.trainer.test_mini_batches import config, rewarded


def rollouts_with(rewards, length=3):
    """One row of `rewards` per prompt."""
    tokens, logp = np.full(length, 7, np.int32), np.zeros(length, np.float32)
    return [
        ScoredRollout(
            Rollout(Prompt(p, (), tokens, "4"), s, tokens, logp, logp == 0, 0, "stop"),
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


def test_a_group_that_is_too_easy_or_too_hard_is_dropped_where_a_range_is_given():
    groups = split_groups(rollouts_with([[1, 0], [1, 0.9], [1, 1], [0.1, 0]]), 2)
    kept, dropped = split_flat(groups, mean_range=(0.1, 0.9))
    assert ids(kept) == [0] and ids(dropped) == [1, 2, 3]


def test_a_prompt_is_solved_where_its_mean_reward_reaches_the_pass_rate():
    groups = split_groups(rollouts_with([[1, 0], [1, 1], [0, 0]]), 2)
    assert solved_prompts(groups, 0.5) == [0, 1]
    assert solved_prompts(groups, 1.0) == [1]


def lengthened(lengths):
    return [r for length in lengths for r in rollouts_with([[1]], length)]


def test_the_overlong_punishment_is_charged_and_logged():
    c = config()
    c.reward.overlong_buffer, c.reward.overlong_penalty = 8, 0.5
    # max_response_len 32: free up to 24; 28 is half way, 32 the whole 0.5
    got = add_overlong_penalty(lengthened([24, 28, 32]), resolve(c))
    np.testing.assert_allclose([r.reward.value for r in got], [1, 0.75, 0.5])
    assert [r.reward.parts for r in got][1] == {"overlong": -0.25}
    assert add_overlong_penalty(lengthened([32]), resolve(config()))[0].reward.value == 1


def test_overlong_filtering_leaves_cut_off_responses_out_of_the_loss_but_in_their_group():
    some, rewards = rewarded([[1, 0], [1, 0]])
    some[1] = dataclasses.replace(some[1], truncated=True)
    cfg = resolve(config(overlong_filtering=True, advantage="dr_grpo"))
    assert len(without_overlong(some, cfg)) == 3
    assert len(without_overlong(some, resolve(config()))) == 4
    minis, _ = make_mini_batches(some, rewards, cfg, n_ranks=1, score_old=None, score_ref=None)
    batches = [p.batch for p in minis[0].packed]
    assert sum(b.mask.sum() for b in batches) == 9 and not minis[0].idle
    # the baseline of the first group is still the mean of both
    advantages = np.concatenate([b.advantages[b.mask > 0] for b in batches])
    np.testing.assert_allclose(np.sort(advantages), [-0.5] * 3 + [0.5] * 6)
