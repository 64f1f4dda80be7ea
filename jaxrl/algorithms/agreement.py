"""Agreement of two raters of the same items, such as a judge and a person."""

import numpy as np
from jaxtyping import Float, Int


def weighted_kappa(a: Int[np.ndarray, "N"], b: Int[np.ndarray, "N"]) -> float:
    """Cohen's kappa with quadratic weights (Cohen 1968), for integers on one scale:

        1 - sum_i (a_i - b_i)^2 / (sum_ij (a_i - b_j)^2 / N)

    1 is agreement everywhere, 0 that of chance with the same frequencies. With two levels it is
    Cohen's kappa without weights. NaN if both raters gave one and the same score to all items.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    # sum_ij (a_i - b_j)^2 / N = sum_i a_i^2 + sum_j b_j^2 - 2 sum_i a_i mean(b)
    chance = (a**2).sum() + (b**2).sum() - 2 * a.sum() * b.mean()
    return float(1 - ((a - b) ** 2).sum() / chance) if chance > 1e-12 else float("nan")


def spearman(a: Float[np.ndarray, "N"], b: Float[np.ndarray, "N"]) -> float:
    """Spearman's correlation: Pearson's of the ranks; equal values share the mean of their ranks.

    NaN if one of them is constant.
    """
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    if not (ranks_a.std() > 0 and ranks_b.std() > 0):
        return float("nan")
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])


def _ranks(x: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]
