"""Rotary position embedding (https://arxiv.org/abs/2104.09864), rotated by halves as in Hugging
Face.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.models.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """float32 [head_dim / 2]: radians per position of each feature pair.

    "linear" divides positions by `factor` (https://arxiv.org/abs/2306.15595); "llama3" divides only
    the long wavelengths, with a smooth transition (Llama 3.1, https://arxiv.org/abs/2407.21783).
    """
    inv = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    if rope.kind == "default":
        return inv.astype(np.float32)
    if rope.kind == "linear":
        return (inv / rope.factor).astype(np.float32)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / inv
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = np.clip((rope.original_len / wavelength - low) / (high - low), 0.0, 1.0)
        return ((1 - smooth) * inv / rope.factor + smooth * inv).astype(np.float32)
    raise ValueError(f"rope scaling {rope.kind!r} is not known; known: default, linear, llama3")


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    inv_freq: Float[Array | np.ndarray, "H2"],
) -> Float[Array, "B T N H"]:
    """Rotates the feature pairs (x[i], x[i + H/2]) by position * inv_freq[i], in float32."""
    angles = positions[:, :, None, None].astype(jnp.float32) * inv_freq
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
