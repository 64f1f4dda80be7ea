"""Penalties of long and of truncated responses by hand."""

import numpy as np

from jaxrl.algorithms.reward_shaping import length_penalty, soft_overlong, stop_properly


def test_the_punishment_grows_linearly_over_the_buffer():
    got = soft_overlong(np.array([5, 16, 17, 18, 20, 99]), max_len=20, buffer_len=4)
    # free up to 16; 1, 2 and 4 of 4 over; never below -1
    np.testing.assert_allclose(got, [0, 0, -0.25, -0.5, -1, -1])


def test_truncated_responses_keep_a_share_of_their_reward_or_have_a_fixed_one():
    rewards, truncated = np.array([1.0, 0.5, -0.2]), np.array([True, False, True])
    np.testing.assert_allclose(stop_properly(rewards, truncated, coef=0.1), [0.1, 0.5, -0.02])
    np.testing.assert_allclose(stop_properly(rewards, truncated, coef=0.0), [0, 0.5, 0])
    np.testing.assert_allclose(stop_properly(rewards, truncated, coef=-0.5), [-0.5, 0.5, -0.5])


def test_the_length_penalty_grows_with_the_pass_rate_and_the_relative_length():
    # pass rate 1/2: 0.2 * 0.5 * (5, 10, 20, 20) / 20
    got = length_penalty(np.array([1.0, 0, 1, 0]), np.array([5, 10, 20, 20]), weight=0.2)
    np.testing.assert_allclose(got, [-0.025, -0.05, -0.1, -0.1])
    assert not length_penalty(np.array([0.0, 0.0]), np.array([3, 9]), weight=0.2).any()
    assert not length_penalty(np.array([-1.0, 0.0]), np.array([3, 9]), weight=0.2).any()
