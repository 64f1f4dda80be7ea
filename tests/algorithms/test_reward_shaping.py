"""The soft overlong punishment by hand."""

import numpy as np

from jaxrl.algorithms.reward_shaping import soft_overlong


def test_the_punishment_grows_linearly_over_the_buffer():
    got = soft_overlong(np.array([5, 16, 17, 18, 20, 99]), max_len=20, buffer_len=4)
    # free up to 16; 1, 2 and 4 of 4 over; never below -1
    np.testing.assert_allclose(got, [0, 0, -0.25, -0.5, -1, -1])
