"""Numbers in eight bits, those of a row or a head with one scale."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl import types

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # dtype -> what the largest number becomes


@struct.dataclass
class Quantized:
    """values * scale, where a scale serves the trailing axes that it has not."""

    values: types.Array  # of a dtype in LARGEST, [*A, *S]
    scale: types.Array  # floating, [*A]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype


def quantize(
    x: jax.Array, *, n_shared: int, dtype: DTypeLike, scale_dtype: DTypeLike = jnp.float32
) -> Quantized:
    """The nearest numbers of `dtype`, scaled so that the largest magnitude over the last `n_shared` axes
    becomes its largest.

    int8 is then off by half a scale at most, float8_e4m3fn by 2^-4 of a number, or 2^-10 scales where it is
    smaller than 2^-6 of them. A scale is rounded to `scale_dtype` before it is used: it costs nothing beyond
    that. Zeros stay zeros.
    """
    dtype, x = jnp.dtype(dtype), x.astype(jnp.float32)
    most, axes = LARGEST[dtype.name], tuple(range(x.ndim - n_shared, x.ndim))
    scale = (jnp.max(jnp.abs(x), axis=axes) * (1 / most)).astype(scale_dtype)
    scale = jnp.where(scale > 0, scale, 1)
    values = jnp.clip(x / jnp.expand_dims(scale.astype(jnp.float32), axes), -most, most)
    if dtype == jnp.int8:
        values = jnp.round(values)
    return Quantized(values.astype(dtype), scale)


def dequantize(x: jax.Array | Quantized) -> jax.Array:
    """The float32 numbers of an array, or of a quantised one."""
    if not isinstance(x, Quantized):
        return x.astype(jnp.float32)
    axes = tuple(range(x.scale.ndim, x.values.ndim))
    return x.values.astype(jnp.float32) * jnp.expand_dims(x.scale.astype(jnp.float32), axes)
