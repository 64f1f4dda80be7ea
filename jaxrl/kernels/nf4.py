"""4-bit NormalFloat storage of frozen weights (QLoRA, https://arxiv.org/abs/2305.14314).

A block of values is stored as a scale, its largest magnitude, and a 4-bit code per value: the
nearest of 16 levels to value / scale. The levels are quantiles of a normal distribution.

qwix has the same levels; its arrays have one code per byte on CPU, and its reshapes of a sharded
axis are errors in JAX's explicit sharding mode.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike

from jaxrl import types

LEVELS = (  # appendix E of the paper
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
MAX_BLOCK = 64  # values that share a scale, as in the paper


@struct.dataclass
class NF4:
    """levels[codes] * scale; a scale belongs to `block_size(S)` values of the last axis."""

    codes: types.Array  # uint8 [*A, S / 2]; the first of two values is in the upper four bits
    scale: types.Array  # floating, [*A, S / block]

    @property
    def shape(self) -> tuple[int, ...]:
        """[*A, S]"""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])


def block_size(n: int) -> int:
    """Values per scale along an axis of n. Raises ValueError for an odd axis."""
    if n % 2:
        raise ValueError(f"nf4 stores pairs of values, but an axis has {n}; use int8")
    return math.gcd(n, MAX_BLOCK)


def quantize_nf4(x: jax.Array, *, scale_dtype: DTypeLike) -> NF4:
    """The nearest levels; a scale is rounded to `scale_dtype` before use. Zeros stay zeros."""
    spec, block = jax.typeof(x).sharding.spec, block_size(x.shape[-1])
    blocks = _split_last(x.astype(jnp.float32), block, spec)
    scale = jnp.max(jnp.abs(blocks), axis=-1).astype(scale_dtype)
    scale = jnp.where(scale > 0, scale, 1)
    blocks = blocks / scale[..., None].astype(jnp.float32)
    codes = jnp.zeros_like(blocks, jnp.uint8)
    for low, high in itertools.pairwise(LEVELS):
        codes += (blocks > (low + high) / 2).astype(jnp.uint8)
    pairs = _split_last(_reshape(codes, x.shape, spec), 2, spec)
    return NF4(pairs[..., 0] << 4 | pairs[..., 1], scale)


def dequantize_nf4(x: NF4, dtype: DTypeLike) -> jax.Array:
    """The values [*A, S], computed in float32."""
    spec = jax.typeof(x.codes).sharding.spec
    pairs = jnp.stack([_levels(x.codes >> 4), _levels(x.codes & 15)], axis=-1)
    blocks = _split_last(_reshape(pairs, x.shape, spec), block_size(x.shape[-1]), spec)
    blocks = blocks * x.scale[..., None].astype(jnp.float32)
    return _reshape(blocks, x.shape, spec).astype(dtype)


def dequantize_nf4_reference(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`dequantize_nf4` on the host, by table."""
    pairs = np.stack([codes >> 4, codes & 15], axis=-1)
    blocks = np.array(LEVELS, np.float32)[pairs].reshape(*scale.shape, -1)
    return (blocks * scale[..., None].astype(np.float32)).reshape(*codes.shape[:-1], -1)


def _levels(codes: jax.Array) -> jax.Array:
    """LEVELS[codes] by 15 selections, which vectorize where a gather from a table does not."""
    levels: list = [jnp.float32(level) for level in LEVELS]
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        pairs = zip(levels[::2], levels[1::2], strict=True)
        levels = [jnp.where(is_set, high, low) for low, high in pairs]
    return levels[0]


def _split_last(x: jax.Array, size: int, spec: jax.P) -> jax.Array:
    """[*A, S] -> [*A, S / size, size]."""
    return _reshape(x, (*x.shape[:-1], x.shape[-1] // size, size), jax.P(*spec, None))


def _reshape(x: jax.Array, shape: tuple[int, ...], spec: jax.P) -> jax.Array:
    return jnp.reshape(x, shape, out_sharding=spec if any(spec) else None)
