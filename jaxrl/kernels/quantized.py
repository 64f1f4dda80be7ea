"""Quantization to int8 and fp8 with one scale per row or head."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl import types

MAX_VALUE = {"int8": 127.0, "float8_e4m3fn": 448.0}  # dtype -> its largest finite value


@struct.dataclass
class Quantized:
    """values * scale; the scale broadcasts over the trailing axes that it lacks."""

    values: types.Array  # of a dtype in MAX_VALUE, [*A, *S]
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
    """Rounds to `dtype`, scaled so that the largest magnitude over the last `n_shared` axes becomes
    the dtype's maximum.

    The error of int8 is at most half a scale. That of float8_e4m3fn is at most 2^-4 of a number, or
    2^-10 scales for numbers below 2^-6 scales. A scale is rounded to `scale_dtype` before use, so
    its rounding adds no further error. Zeros stay zeros.
    """
    dtype, x = jnp.dtype(dtype), x.astype(jnp.float32)
    max_value, axes = MAX_VALUE[dtype.name], tuple(range(x.ndim - n_shared, x.ndim))
    scale = (jnp.max(jnp.abs(x), axis=axes) * (1 / max_value)).astype(scale_dtype)
    scale = jnp.where(scale > 0, scale, 1)
    values = jnp.clip(x / jnp.expand_dims(scale.astype(jnp.float32), axes), -max_value, max_value)
    if dtype == jnp.int8:
        values = jnp.round(values)
    return Quantized(values.astype(dtype), scale)


def dequantize(x: jax.Array | Quantized) -> jax.Array:
    """The float32 values of an array or a quantized array."""
    if not isinstance(x, Quantized):
        return x.astype(jnp.float32)
    axes = tuple(range(x.scale.ndim, x.values.ndim))
    return x.values.astype(jnp.float32) * jnp.expand_dims(x.scale.astype(jnp.float32), axes)
