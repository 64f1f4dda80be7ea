"""Layers computed in chunks of tokens, so that the intermediate results of one chunk exist at a
time.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.types import Tree


def n_chunks(n_tokens: int, chunk: int, length: int) -> int:
    """The fewest equal parts of `length` positions with at most `chunk` of the `n_tokens` in each.

    A part has at least one position. With chunk = 0, it is 1.
    """
    least = -(-n_tokens // chunk) if chunk else 1
    return next((n for n in range(least, length) if length % n == 0), length)


def apply_to_chunks[Weights](
    fn: Callable[[Weights, Tree], jax.Array], weights: Weights, chunks: Tree
) -> jax.Array:
    """Stacks fn(weights, chunk) over the leading axis of `chunks`, one after the other.

    The backward pass recomputes a chunk's intermediate results. It sums the gradients of the
    weights over the chunks in float32 and rounds the sum once, as one matrix product would.
    """

    def widen(w: jax.Array) -> jax.Array:
        return w.astype(jnp.float32) if jnp.issubdtype(w.dtype, jnp.floating) else w

    wide = jax.tree.map(widen, weights)

    def one(_, chunk: Tree) -> tuple[None, jax.Array]:
        return None, fn(jax.tree.map(lambda w, old: w.astype(old.dtype), wide, weights), chunk)

    return jax.lax.scan(jax.checkpoint(one, prevent_cse=False), None, chunks)[1]


def split_positions(x: Float[Array, "B T D"], n: int) -> Float[Array, "n B t D"]:
    """n chunks of the positions, each with an equal part of the positions of every device."""
    B, T, D = x.shape
    rows, time = jax.typeof(x).sharding.spec[:2]
    shards = n_position_shards(x)
    split = jnp.reshape(
        x, (B, shards, n, T // shards // n, D), out_sharding=jax.P(rows, time, None, None, None)
    )
    chunks = jnp.moveaxis(split, 2, 0)
    return jnp.reshape(chunks, (n, B, T // n, D), out_sharding=jax.P(None, rows, time, None))


def join_positions(
    chunks: Float[Array, "n B t D"], like: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """The inverse of `split_positions` for chunks of `like`, with its sharding."""
    n, B, t, D = chunks.shape
    rows, time = jax.typeof(like).sharding.spec[:2]
    shards = n_position_shards(like)
    split = jnp.reshape(
        chunks, (n, B, shards, t // shards, D), out_sharding=jax.P(None, rows, time, None, None)
    )
    joined = jnp.moveaxis(split, 0, 2)
    return jnp.reshape(joined, like.shape, out_sharding=jax.P(rows, time, None))


def n_position_shards(x: Float[Array, "B T D"]) -> int:
    """Devices that share the positions of a row."""
    sharding = jax.typeof(x).sharding
    axes = sharding.spec[1] or ()
    axes = (axes,) if isinstance(axes, str) else axes
    return math.prod(sharding.mesh.shape[axis] for axis in axes)
