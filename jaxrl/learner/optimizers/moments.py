"""Moments stored in bfloat16 or 8 bits between optimizer steps."""

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl.learner.optimizers.blocks import QuantizedBlocks, block_axes, dequantize, quantize
from jaxrl.models.spec import ParamSpec, map_specs
from jaxrl.types import Tree

MOMENTS = {"mu", "nu"}  # fields of an optax state; nu is a mean of squares


def store_moments(
    transform: optax.GradientTransformation, dtype: str, specs: Tree
) -> optax.GradientTransformation:
    """`transform` with its moments in `dtype` between steps; a step itself is in float32.

    The state of `transform` is a named tuple with the fields `mu` or `nu`. bfloat16 rounds `mu` to
    nearest, and `nu` stochastically: (1 - b2) is below half a unit in the last place, so that a
    moment rounded to nearest would never fall. int8 is block-wise (blocks.py).
    """
    if dtype == "float32":
        return transform
    narrow = _quantized if dtype == "int8" else _bfloat16

    def stored(state: Any, step: jax.Array) -> Any:
        for name in MOMENTS & set(state._fields):
            store = functools.partial(narrow, signed=name == "mu", step=step)
            state = state._replace(**{name: map_specs(store, specs, getattr(state, name))})
        return state

    def loaded(state: Any) -> Any:
        for name in MOMENTS & set(state._fields):
            state = state._replace(**{name: map_specs(_float32, specs, getattr(state, name))})
        return state

    def init(params: Tree) -> Any:
        # Moments start at zero, with codes and scales of zero. XLA would compute those of constant
        # zeros while it compiles, in minutes.
        state: Any = transform.init(params)
        first = jnp.zeros((), jnp.int32)
        kinds = jax.eval_shape(lambda p: stored(transform.init(p), first), params)
        moments = {name: getattr(kinds, name) for name in MOMENTS & set(state._fields)}
        return state._replace(**jax.tree.map(_zeros, moments))

    def update(grads: Tree, state: Any, params: Tree | None = None):
        updates, state = transform.update(grads, loaded(state), params)
        # A tuple has a method of that name.
        step = state.count if "count" in state._fields else jnp.zeros((), jnp.int32)
        return updates, stored(state, step)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """bfloat16 of float32 numbers, up or down with the odds that give the mean `x`."""
    sharding = jax.typeof(x).sharding if not jax.sharding.get_abstract_mesh().empty else None
    noise = jax.random.bits(key, x.shape, jnp.uint16, out_sharding=sharding)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype, device=like.sharding)


def _bfloat16(spec: ParamSpec, x: jax.Array, *, signed: bool, step: jax.Array) -> jax.Array:
    if signed:
        return x.astype(jnp.bfloat16)
    key = jax.random.fold_in(jax.random.key(zlib.crc32(spec.hf.encode())), step)
    return round_stochastically(x, key)


def _quantized(
    spec: ParamSpec, x: jax.Array, *, signed: bool, step: jax.Array
) -> jax.Array | QuantizedBlocks:
    axes = block_axes(spec)
    return x if axes is None else quantize(x, axes, signed=signed)


def _float32(spec: ParamSpec, stored: jax.Array | QuantizedBlocks) -> jax.Array:
    if isinstance(stored, QuantizedBlocks):
        axes = block_axes(spec)
        assert axes is not None
        return dequantize(stored, axes)
    return stored.astype(jnp.float32)
