"""Reference loops in NumPy, in float64."""

import numpy as np


def numpy_newton_schulz(x: np.ndarray, steps: int) -> np.ndarray:
    """The loop of https://kellerjordan.github.io/posts/muon."""
    x, tall = np.asarray(x, np.float64), x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.sqrt((x * x).sum()) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def code_table(signed: bool) -> np.ndarray:
    """Dynamic tree quantization: the values of all 256 codes, ascending.

    https://arxiv.org/abs/2110.02861, section 1.3: midpoints of equal intervals of [0.1, 1], twice
    as many in each higher decade, with 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*middles, *(-middles if signed else [])]
    return np.sort(values)
