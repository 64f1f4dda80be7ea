import numpy as np

from jaxrl.algorithms.losses.ratings import rating_errors


def test_the_error_of_a_rating_is_squared_and_missing_ones_have_none():
    scores, ratings = np.array([[1.0, 3.0], [0.5, -1.0]]), np.array([[4.0, np.nan], [0.0, -2.0]])
    errors, slope = rating_errors(scores, ratings)
    np.testing.assert_allclose(errors, [[9.0, 0.0], [0.25, 1.0]])  # (1 - 4)², -, 0.5², 1²
    np.testing.assert_allclose(slope, [[-6.0, 0.0], [1.0, 2.0]])
