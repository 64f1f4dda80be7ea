"""Penalties for responses at or near the length limit. Host arrays, lengths in tokens."""

import numpy as np
from jaxtyping import Bool, Float, Int


def soft_overlong(
    lengths: Int[np.ndarray, " N"], *, max_len: int, buffer_len: int
) -> Float[np.ndarray, " N"]:
    """0 up to max_len - buffer_len tokens, then linear down to -1 at max_len.

    The soft overlong punishment of DAPO, eq. 13 (https://arxiv.org/abs/2503.14476).
    """
    over = lengths - (max_len - buffer_len)
    return -np.clip(over / max(buffer_len, 1), 0.0, 1.0)


def stop_properly(
    rewards: Float[np.ndarray, " N"], truncated: Bool[np.ndarray, " N"], *, coef: float
) -> Float[np.ndarray, " N"]:
    """coef r for truncated responses, or coef itself if it is negative; r for the others.

    The stop-properly penalty of ProRL v2, as in OpenRLHF and NeMo RL
    (https://docs.nvidia.com/nemo/rl/nightly/guides/prorlv2.html).
    """
    return np.where(truncated, coef if coef < 0 else coef * rewards, rewards)


def length_penalty(
    rewards: Float[np.ndarray, " n"], lengths: Int[np.ndarray, " n"], *, weight: float
) -> Float[np.ndarray, " n"]:
    """-weight p l / max(l) over the responses of a prompt, with the pass rate p = mean(r) >= 0.

    A prompt that is often solved should be solved in fewer tokens; one that is not may take them.
    It is the output-token term of prime-rl's linear length penalty.
    """
    return -weight * max(float(rewards.mean()), 0.0) * lengths / max(int(lengths.max()), 1)
