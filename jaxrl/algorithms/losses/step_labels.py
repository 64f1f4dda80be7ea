"""The loss of process reward models, of the scores of steps."""

import numpy as np
from jaxtyping import Float

Steps = Float[np.ndarray, " N"]


def step_cross_entropy(scores: Steps, labels: Steps) -> tuple[Steps, Steps]:
    """(-y log σ(s) - (1 - y) log(1 - σ(s)), its derivative σ(s) - y) of scores s and labels y.

    A label from 0 to 1 is the probability that the step is right (Math-Shepherd, eq. 5,
    https://arxiv.org/abs/2312.08935). Two logits a, b with a softmax are the score s = b - a.
    float64.
    """
    s, y = scores.astype(np.float64), labels.astype(np.float64)
    return np.logaddexp(0.0, s) - y * s, np.exp(-np.logaddexp(0.0, -s)) - y
