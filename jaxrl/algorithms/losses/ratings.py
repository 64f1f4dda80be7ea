"""The loss of reward models with a label for each attribute of an answer."""

import numpy as np
from jaxtyping import Float

Ratings = Float[np.ndarray, "N K"]


def rating_errors(scores: Ratings, ratings: Ratings) -> tuple[Ratings, Ratings]:
    """((s - y)², its derivative 2 (s - y)) of scores s and ratings y; both 0 where y is NaN.

    The regression of HelpSteer2 (https://arxiv.org/abs/2406.08673) and ArmoRM
    (https://arxiv.org/abs/2406.12845) on the attributes that a row has. float64.
    """
    difference = scores.astype(np.float64) - ratings.astype(np.float64)
    difference = np.where(np.isnan(ratings), 0.0, difference)
    return np.square(difference), 2.0 * difference
