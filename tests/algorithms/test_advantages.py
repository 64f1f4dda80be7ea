"""Group advantages on hand-made rewards."""

import numpy as np
import pytest

from jaxrl.algorithms.advantages import ESTIMATORS, grpo


def rewards(*rows):
    return np.array(rows, np.float32)


def test_grpo_divides_by_the_unbiased_std_of_the_group():
    # mean 1, deviations (-1, 0, 1), std = sqrt((1 + 0 + 1) / 2) = 1
    got = grpo(rewards([0, 1, 2]), eps=0.0)
    np.testing.assert_allclose(got, [[-1, 0, 1]], rtol=1e-6)
    # mean 0.25, deviations (-.25, -.25, -.25, .75), std = sqrt((3 * .0625 + .5625) / 3) = .5; eps 0.5 -> / 1
    got = grpo(rewards([0, 0, 0, 1]), eps=0.5)
    np.testing.assert_allclose(got, [[-0.25, -0.25, -0.25, 0.75]], rtol=1e-6)


def test_grpo_without_std_is_reward_minus_mean():
    got = grpo(rewards([0, 4], [1, 2]), norm_by_std=False)
    np.testing.assert_allclose(got, [[-2, 2], [-0.5, 0.5]], rtol=1e-6)


def test_groups_do_not_see_each_other():
    both = grpo(rewards([0, 1, 2], [5, 5, 8]))
    np.testing.assert_array_equal(both[1:], grpo(rewards([5, 5, 8])))


def test_equal_rewards_give_no_advantage_even_where_their_mean_rounds():
    got = grpo(np.full((1, 7), 0.1, np.float32))
    np.testing.assert_allclose(got, 0.0, atol=1e-9)


def test_a_group_of_one_is_refused_with_what_to_set():
    with pytest.raises(ValueError, match=r"rollout\.n >= 2"):
        grpo(rewards([1], [2]))


def test_the_table_names_the_estimators():
    assert ESTIMATORS["grpo"] is grpo
