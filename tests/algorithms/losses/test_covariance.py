"""Tokens that Clip-Cov and KL-Cov select."""

import numpy as np

from jaxrl.algorithms.losses.covariance import (
    covariances,
    select_between,
    select_largest,
    select_top_entropy,
)

LOGP = np.array([-1.0, -3.0, -2.0, -2.0], np.float32)
ADVANTAGES = np.array([2.0, -2.0, 1.0, -1.0], np.float32)


def test_the_covariance_is_the_product_of_the_deviations():
    # means -2 and 0: 1 * 2, -1 * -2, 0, 0
    np.testing.assert_allclose(covariances(LOGP, ADVANTAGES), [2, 2, 0, 0])


def test_the_largest_are_selected_at_least_one_and_the_first_of_equals():
    cov = np.array([1.0, 5.0, 5.0, 3.0, 0.0], np.float32)
    np.testing.assert_array_equal(np.flatnonzero(select_largest(cov, cov_fraction=0.4)), [1, 2])
    np.testing.assert_array_equal(np.flatnonzero(select_largest(cov, cov_fraction=0.01)), [1])


def test_random_tokens_between_the_bounds_are_selected():
    cov = np.arange(100, dtype=np.float32)
    keys = dict(cov_fraction=0.05, clip_cov_low=9.5, clip_cov_high=49.5)
    selected = [select_between(cov, np.random.default_rng(seed), **keys) for seed in range(20)]
    for one in selected:
        assert one.sum() == 5 and not one[:10].any() and not one[50:].any()
    assert np.any(selected, axis=0).sum() > 30
    again = select_between(cov, np.random.default_rng(0), **keys)
    np.testing.assert_array_equal(selected[0], again)


def test_nothing_is_selected_if_no_covariance_is_within_the_bounds():
    cov = np.zeros(4, np.float32)
    rng = np.random.default_rng(0)
    keys = dict(cov_fraction=1.0, clip_cov_low=1.0, clip_cov_high=5.0)
    assert not select_between(cov, rng, **keys).any()


def test_the_top_entropy_tokens_are_those_from_the_quantile_on():
    # sorted 0, 1, 2, 3, 4: the quantile .6 is at 2.4, between 2 and 3
    got = select_top_entropy(np.array([3.0, 0.0, 4.0, 1.0, 2.0]), top_entropy=0.4)
    np.testing.assert_array_equal(got, [True, False, True, False, False])
    assert select_top_entropy(np.zeros(3), top_entropy=0.1).all()  # equal entropies
