"""Stochastic rounding of float32 numbers to bfloat16."""

import zlib

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl.types import Tree

DROPPED_BITS = 16  # of a float32 number; bfloat16 keeps the others


def round_tree(tree: Tree, like: Tree, step: Int[Array, ""]) -> Tree:
    """float32 arrays, rounded stochastically to the dtypes of `like`; float32 ones stay.

    The random bits of an element follow from the step, the path of the array in the tree and the
    element's index. So they depend neither on the mesh nor on earlier steps.
    """
    key = jax.random.fold_in(jax.random.key(0), step)

    def one(path, x: jax.Array, ref: jax.Array) -> jax.Array:
        if ref.dtype != jnp.bfloat16:
            return x.astype(ref.dtype)
        name = zlib.crc32(jax.tree_util.keystr(path).encode())
        return round_stochastically(jax.random.fold_in(key, name), x)

    return jax.tree.map_with_path(one, tree, like)


def round_stochastically(key: jax.Array, x: Float[Array, "*A"]) -> Float[Array, "*A"]:
    """x in bfloat16: one of its two neighbours, each with the probability that makes the mean x.

    Up with probability (x - below) / (above - below), for the magnitude of x
    (https://arxiv.org/abs/1502.02551, section 3.1): a random integer below 2^16 is added to the 16
    bits that bfloat16 drops, and a carry rounds up. Numbers that bfloat16 has, infinities and NaN
    stay as they are.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16, out_sharding=jax.typeof(x).sharding)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + noise.astype(jnp.uint32)
    kept = lax.bitcast_convert_type((bits >> DROPPED_BITS).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), kept, x.astype(jnp.bfloat16))
