"""Penalties for responses that approach the length limit. Host arrays, lengths in tokens."""

import numpy as np
from jaxtyping import Float, Int


def soft_overlong(
    lengths: Int[np.ndarray, " N"], *, max_len: int, buffer_len: int
) -> Float[np.ndarray, " N"]:
    """0 up to max_len - buffer_len tokens, then linear down to -1 at max_len.

    The soft overlong punishment of DAPO, eq. 13 (https://arxiv.org/abs/2503.14476).
    """
    over = lengths - (max_len - buffer_len)
    return -np.clip(over / max(buffer_len, 1), 0.0, 1.0)
