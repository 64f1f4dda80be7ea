import math

import numpy as np
import pytest

from jaxrl.algorithms.agreement import spearman, weighted_kappa


def test_kappa_of_two_levels_is_cohens():
    # 3 of 4 agree; by chance 1/2 * 1/4 + 1/2 * 3/4 = 1/2: (3/4 - 1/2) / (1 - 1/2) = 1/2
    assert weighted_kappa(np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0])) == pytest.approx(0.5)


def test_kappa_weighs_the_square_of_the_distance():
    a, b = np.array([1, 2, 3]), np.array([1, 3, 3])
    # differences 0, 1, 0: 1. By chance the nine differences 0 -2 -2, 1 -1 -1, 2 0 0 have squares
    # 4 + 4 + 1 + 1 + 1 + 4 = 15, over N = 3: 5
    assert weighted_kappa(a, b) == pytest.approx(1 - 1 / 5)
    assert weighted_kappa(a, a) == 1.0
    assert math.isnan(weighted_kappa(np.array([2, 2]), np.array([2, 2])))


def test_spearman_ranks_and_shares_ranks_of_equal_values():
    a = np.array([1.0, 2.0, 3.0])
    assert spearman(a, np.array([10.0, 20.0, 1000.0])) == pytest.approx(1.0)
    assert spearman(a, -a) == pytest.approx(-1.0)
    # ranks 1 2 3 and 1.5 1.5 3: covariance (-1)(-0.5) + 0 + 1 * 1 = 1.5, over sqrt(2 * 1.5)
    assert spearman(a, np.array([5.0, 5.0, 6.0])) == pytest.approx(1.5 / math.sqrt(3.0))
    assert math.isnan(spearman(a, np.zeros(3)))
