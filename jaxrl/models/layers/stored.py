"""A weight matrix in the form in which it is stored: its dtype, or int8 or nf4 if it is frozen."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxrl.kernels.nf4 import NF4, block_size, dequantize_nf4, dequantize_nf4_reference
from jaxrl.kernels.quantized import Quantized, dequantize
from sharding import Rules

MakeParam = Callable[..., Any]  # (suffix, shape, axes, init=, hf_shape=, dtype=) -> leaf
Axes = tuple[str | None, ...]
Stored = jax.Array | Quantized | NF4
QUANTIZED = (Quantized, NF4)


def stored_axes(axes: Axes, n_in: int, dtype: str) -> Any:
    """Logical axes of the arrays of a weight whose products sum over its last `n_in` axes.

    The scales of nf4 are replicated where the weight is only sharded to be gathered (FSDP): there
    are few of them, and their number need not divide.
    """
    if dtype == "int8":
        return Quantized(axes, axes[:-n_in])
    if dtype == "nf4":
        return NF4(axes, (*axes[:-1], None if axes[-1] == "w_embed" else axes[-1]))
    return axes


def stored_specs(w: Stored, spec: Callable[..., Any], axes: Axes, n_in: int) -> Any:
    """spec(*axes) of every array of a weight."""
    kind = "int8" if isinstance(w, Quantized) else "nf4" if isinstance(w, NF4) else ""
    parts = stored_axes(axes, n_in, kind)
    if not kind:
        return spec(*parts)
    return type(w)(**{name: spec(*part) for name, part in vars(parts).items()})


def make_stored(
    make: MakeParam,
    name: str,
    shape: tuple[int, ...],
    axes: Axes,
    *,
    n_in: int,
    hf_shape: tuple[int, int],
    dtype: str,
) -> Any:
    """The parameters of a weight [*, out, in]; `dtype` is "int8", "nf4", or "" for the model's."""
    if not dtype:
        return make(f"{name}.weight", shape, axes, hf_shape=hf_shape)
    parts, (out, into) = stored_axes(axes, n_in, dtype), hf_shape
    scale = functools.partial(make, f"{name}.weight_scale", init="ones")
    if dtype == "int8":
        return Quantized(
            make(f"{name}.weight", shape, parts.values, hf_shape=hf_shape, dtype="int8"),
            scale(shape[:-n_in], parts.scale, hf_shape=(out,)),
        )
    *rest, last = shape
    n_blocks, packed = last // block_size(last), (out, into // 2)
    return NF4(
        make(f"{name}.weight", (*rest, last // 2), parts.codes, hf_shape=packed, dtype="uint8"),
        scale((*rest, n_blocks), parts.scale, hf_shape=(out, into * n_blocks // last)),
    )


def gather_stored(w: Quantized | NF4, rules: Rules, axes: Axes, n_in: int) -> Quantized | NF4:
    """The weight all-gathered over the axes that shard only parameters (FSDP).

    It has no gradient, so the reduce-scatter of `gather_matrix` is not needed.
    """
    return jax.tree.map(jax.reshard, w, stored_specs(w, rules.gathered, axes, n_in))


def shard_stored(w: Quantized | NF4, rules: Rules, axes: Axes, n_in: int) -> Quantized | NF4:
    """The weight sharded by the rules."""
    return jax.tree.map(jax.reshard, w, stored_specs(w, rules.spec, axes, n_in))


def dense(w: Quantized | NF4, dtype: DTypeLike) -> jax.Array:
    """The values of a quantized weight."""
    return dequantize_nf4(w, dtype) if isinstance(w, NF4) else dequantize(w).astype(dtype)


def dense_on_host(w: Quantized | NF4) -> np.ndarray:
    """`dense` in float32 of arrays that are on the host."""
    if isinstance(w, NF4):
        return dequantize_nf4_reference(w.codes, w.scale)
    into = tuple(range(w.scale.ndim, w.values.ndim))
    return w.values.astype(np.float32) * np.expand_dims(w.scale.astype(np.float32), into)
