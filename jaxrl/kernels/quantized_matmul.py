"""Products in int8 or fp8 for training (`learner.matmul_dtype`), through qwix.

Activations have a scale per token and weights one per output, absmax over the axis that the product
sums over. Two of the three products of a training step are quantized: the forward product and the
gradient of the inputs. The gradient of the weights sums over all tokens of the batch and keeps the
dtype of its operands, as in SwitchBack (https://arxiv.org/abs/2304.13013, algorithm 1). fp8 is
e4m3, and e5m2 for gradients (https://arxiv.org/abs/2209.05433).
"""

import functools
import importlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

FORWARD = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
GRADIENT = {"int8": jnp.int8, "fp8": jnp.float8_e5m2}
# qwix scales int8 to 127.5, where the largest number rounds to 127 or 128 by its last bit, which
# depends on the program. With this factor of the scale it is 127.
INT8_CALIBRATION = f"absmax,{127.5 / 127}"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def quantized_matmul(
    x: Float[Array, "B T I"], w: Float[Array, "O I"], kind: str, out_sharding: jax.P
) -> Float[Array, "B T O"]:
    """x wᵀ of quantized x and w, in the dtype of x; `kind` is "int8" or "fp8"."""
    dtype = FORWARD[kind]
    y = _product(x, (0, 1), dtype, _plain(w), (0,), dtype, ((2,), (1,)), out_sharding)
    return y.astype(x.dtype)


def quantized_matmul_reference(
    x: Float[Array, "B T I"], w: Float[Array, "O I"], kind: str
) -> Float[Array, "B T O"]:
    """The values of `quantized_matmul` in float32, from dequantized operands."""
    return round_to(x, FORWARD[kind], -1) @ round_to(w, FORWARD[kind], -1).T


def round_to(x: jax.Array, dtype: DTypeLike, axis: int) -> jax.Array:
    """float32 x rounded to `dtype` with an absmax scale along `axis`."""
    x = x.astype(jnp.float32)
    whole = jnp.issubdtype(dtype, jnp.integer)
    largest = 127.0 if whole else float(jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / largest
    scaled = x / jnp.where(scale > 0, scale, 1)
    rounded = jnp.round(scaled) if whole else scaled
    return rounded.astype(dtype).astype(jnp.float32) * scale


def _forward(x, w, kind: str, out_sharding: jax.P):
    return quantized_matmul(x, w, kind, out_sharding), (x, w)


def _backward(kind: str, out_sharding: jax.P, saved, grad):
    x, w = saved
    x_spec = jax.typeof(x).sharding.spec
    dx = _product(
        grad, (0, 1), GRADIENT[kind], _plain(w), (1,), FORWARD[kind], ((2,), (0,)), x_spec
    )

    def product(w: jax.Array) -> jax.Array:
        return jnp.einsum("BTI,OI->BTO", x, w, out_sharding=out_sharding)

    (dw,) = jax.vjp(product, w)[1](grad)
    return dx.astype(x.dtype), dw


quantized_matmul.defvjp(_forward, _backward)


def _plain(w: jax.Array) -> jax.Array:
    """A gathered weight without the type that makes its gradient a reduce-scatter."""
    return jax.reshard(w, jax.P(*jax.typeof(w).sharding.spec.partitions))


def _product(a, a_scales, a_dtype, b, b_scales, b_dtype, contracted, out_sharding) -> jax.Array:
    """float32 product of a and b, quantized with a scale for every index of some axes of each."""
    qwix = importlib.import_module("qwix")  # an extra of the package; the config checks it

    def quantized(x: jax.Array, axes: tuple[int, ...], dtype: DTypeLike):
        method = INT8_CALIBRATION if jnp.dtype(dtype) == jnp.int8 else "absmax"
        x = x.astype(jnp.float32)
        return qwix.quantize(x, dtype, channelwise_axes=axes, calibration_method=method)

    a, b = quantized(a, a_scales, a_dtype), quantized(b, b_scales, b_dtype)
    return qwix.dot_general(a, b, (contracted, ((), ())), out_sharding=out_sharding)
