"""Block-wise dynamic 8-bit quantization of moments, in blocks that shards do not split."""

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.models.spec import ParamSpec, is_spec
from jaxrl.types import Array, Tree
from sharding import Rules

SIDE = 16  # a block has SIDE x SIDE elements
MIN_SIZE = 4096  # elements; smaller tensors stay float32
DECADES = 7  # the codes span 10^-7 to 1


@struct.dataclass
class QuantizedBlocks:
    """A quantized parameter-shaped array."""

    codes: Array  # int8 (signed) or uint8, the parameter's shape
    scale: Array  # float32, largest magnitude of each block; two axes are SIDE times shorter


def block_axes(spec: ParamSpec) -> tuple[int, int] | None:
    """The two axes that blocks extend over; None for a tensor that stays float32.

    One axis of the rows and one of the columns; of several, one that no rule shards. The token
    embedding (https://arxiv.org/abs/2110.02861, section 2.3), vectors and small matrices stay
    float32.
    """
    small = min(spec.hf_shape) < SIDE or spec.hf_shape[0] * spec.hf_shape[-1] < MIN_SIZE
    if not spec.is_matrix or small or spec.hf.endswith("embed_tokens.weight"):
        return None
    rows, cols = (max(axes, key=lambda d: (spec.axes[d] is None, d)) for axes in spec.matrix_axes)
    return rows, cols


def check_blocks(specs: Tree, rules: Rules) -> None:
    """Raises one ValueError that lists the parameters whose shards blocks do not divide.

    The mesh is the current one.
    """
    errors = []
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        for dim in block_axes(spec) or ():
            size, axis = spec.shape[dim], spec.axes[dim]
            n = rules.n_shards(axis) if axis else 1
            if size % (n * SIDE):
                over = " x ".join(rules.mesh_axes(axis)) if axis else ""
                shards = f" over {n} devices of mesh.{over}" if n > 1 else ""
                errors.append(f"{spec.hf} has {size} elements{shards} on axis {dim}")
    if errors:
        more = f" and {len(errors) - 4} more" if len(errors) > 4 else ""
        raise ValueError(
            f"config.learner.moment_dtype='int8' needs blocks of {SIDE} x {SIDE} elements on every "
            f"device, which do not divide this model: {'; '.join(errors[:4])}{more}. Set mesh "
            f"sizes that leave a multiple of {SIDE}, or moment_dtype='bfloat16'"
        )


def quantize(x: jax.Array, axes: tuple[int, int], *, signed: bool) -> QuantizedBlocks:
    """Each element divided by its block's largest magnitude, as the code of the nearest value.

    Block-wise dynamic quantization (https://arxiv.org/abs/2110.02861, sections 1.3 and 2.1), with
    square blocks so that shards hold whole ones. Positive numbers without a sign are rounded up to
    the smallest code above 0: a second moment of 0 would divide by epsilon alone.
    """
    split = _split(x, axes)
    inner = tuple(d + 1 + i for i, d in enumerate(sorted(axes)))
    scale = jnp.max(jnp.abs(split), axis=inner, keepdims=True)
    codes = encode(split / jnp.where(scale > 0, scale, 1.0), signed=signed)
    return QuantizedBlocks(_reshape(codes, x.shape, x), jnp.squeeze(scale, inner))


def dequantize(blocks: QuantizedBlocks, axes: tuple[int, int]) -> jax.Array:
    """float32 array of the parameter's shape."""
    signed = blocks.codes.dtype == jnp.int8
    inner = tuple(d + 1 + i for i, d in enumerate(sorted(axes)))
    values = decode(_split(blocks.codes, axes), signed=signed)
    return _reshape(values * jnp.expand_dims(blocks.scale, inner), blocks.codes.shape, blocks.codes)


def encode(x: jax.Array, *, signed: bool) -> jax.Array:
    """Codes of numbers in [-1, 1] (int8) or [0, 1] (uint8).

    Dynamic tree quantization: 10^(e - 6) (0.1 + 0.9 (i + 1/2) / n) for the decades e = 0 .. 6 and
    i < n = 2^e (2^(e+1) without a sign), and 0 and 1. The code is n + i with the sign; -1 has no
    code.
    """
    magnitude, extra = jnp.abs(x), 0 if signed else 1
    first = [_value(e, 0.5, extra) for e in range(DECADES)]
    last = [0.0, *(_value(e, 2 ** (e + extra) - 0.5, extra) for e in range(DECADES))]
    above = [magnitude > (low + high) / 2 for low, high in zip(last, [*first, 1.0], strict=True)]
    decade = jnp.clip(sum(a.astype(jnp.int32) for a in above[:DECADES]) - 1, 0)
    n = 1 << (decade + extra)
    place = (magnitude * jnp.exp2((6 - decade) * LOG2_10) - 0.1) / 0.9 * n
    index = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, n - 1)
    code = jnp.where(above[0], n + index - extra, 0)
    if not signed:
        code = jnp.where((code == 0) & (x > 0), 1, code)
        return jnp.where(above[-1], 255, code).astype(jnp.uint8)
    code = jnp.where(above[-1] & (x > 0), -128, jnp.where(x < 0, -code, code))
    return code.astype(jnp.int8)


def decode(codes: jax.Array, *, signed: bool) -> jax.Array:
    """The float32 numbers of codes."""
    whole, extra = codes.astype(jnp.int32), 0 if signed else 1
    place = jnp.abs(whole) + extra
    exponent = 31 - jax.lax.clz(jnp.maximum(place, 1))
    fraction = (place - (1 << exponent) + 0.5) / (1 << exponent)
    decade = jnp.exp2((exponent - extra - 6) * LOG2_10)
    value = jnp.sign(whole) * decade * (0.1 + 0.9 * fraction)
    return jnp.where(whole == (-128 if signed else 255), 1.0, value).astype(jnp.float32)


LOG2_10 = 3.321928094887362


def _value(decade: int, place: float, extra: int) -> float:
    return 10.0 ** (decade - 6) * (0.1 + 0.9 * place / 2 ** (decade + extra))


def _split(x: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Each of the axes as two: blocks and the elements of one."""
    shape, spec = [], []
    for dim, (size, part) in enumerate(zip(x.shape, _parts(x), strict=True)):
        shape += [size // SIDE, SIDE] if dim in axes else [size]
        spec += [part, None] if dim in axes else [part]
    return _reshape_to(x, tuple(shape), jax.P(*spec))


def _reshape(x: jax.Array, shape: tuple[int, ...], like: jax.Array) -> jax.Array:
    return _reshape_to(x, shape, jax.P(*_parts(like)))


def _reshape_to(x: jax.Array, shape: tuple[int, ...], spec: jax.P) -> jax.Array:
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    return jnp.reshape(x, shape, out_sharding=spec if has_mesh else None)


def _parts(x: jax.Array) -> tuple:
    spec = jax.typeof(x).sharding.spec
    return (*spec, *[None] * (x.ndim - len(spec)))
