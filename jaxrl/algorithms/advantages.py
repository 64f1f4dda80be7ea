"""Advantages from the rewards of grouped samples. Host arrays: P prompts with n samples each."""

import numpy as np
from jaxtyping import Float


def grpo(
    rewards: Float[np.ndarray, "P n"], *, norm_by_std: bool = True, eps: float = 1e-6
) -> Float[np.ndarray, "P n"]:
    """A = (r - mean(r)) / (std(r) + eps) over each group, with the n - 1 form of std.

    GRPO, section 4.1.2 (https://arxiv.org/abs/2402.03300). Without `norm_by_std` A = r - mean(r):
    Dr.GRPO, section 3.1 (https://arxiv.org/abs/2503.20783). A group of equal rewards gives zeros.
    Raises ValueError for groups of one, which have no baseline.
    """
    if rewards.shape[1] < 2:
        raise ValueError(
            "grpo compares the samples of a prompt, but there is 1; set config.rollout.n >= 2"
        )
    # float64: in float32 the mean of equal rewards is off by a rounding, which eps would blow up.
    r = rewards.astype(np.float64)
    centred = r - r.mean(axis=1, keepdims=True)
    if norm_by_std:
        centred = centred / (r.std(axis=1, ddof=1, keepdims=True) + eps)
    return centred.astype(np.float32)


ESTIMATORS = {"grpo": grpo}
