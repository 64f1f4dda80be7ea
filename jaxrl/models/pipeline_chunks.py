"""Moves stacked layers between contiguous stages and the chunks of interleaved 1F1B.

Stored layers are contiguous: with S stages and V chunks each, stage s holds the chunks s V to
s V + V - 1. The schedule needs chunk c on stage c mod S (pipeline_schedule.py). A device sends
at most its L / S layers, in V messages to one stage each.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.models.pipeline import shard_over_stages
from jaxrl.types import Tree
from sharding import Rules


class Move(NamedTuple):
    """One chunk: its stage, and its index among the chunks of the stage, before and after."""

    source: int
    source_index: int
    target: int
    target_index: int


def rounds(n_stages: int, n_chunks: int) -> Iterator[list[Move]]:
    """V rounds of moves from contiguous to interleaved; each stage sends and receives one chunk.

    With g = gcd(S, V), stages S / g apart have the same targets for their chunks of one index, so
    they send chunks of different indices.
    """
    apart = n_stages // math.gcd(n_stages, n_chunks)
    for first in range(n_chunks):
        moves = []
        for source in range(n_stages):
            index = (first + source // apart) % n_chunks
            chunk = source * n_chunks + index
            moves.append(Move(source, index, chunk % n_stages, chunk // n_stages))
        yield moves


def to_chunks(layers: Tree, rules: Rules) -> Tree:
    """[L, ...] -> [S V, L / (S V), ...], sharded over stages, those of a stage in order."""

    def split(a: jax.Array) -> jax.Array:
        a = jnp.reshape(a, (rules.chunks, -1, *a.shape[1:]))
        return _move(a, rules, list(rounds(rules.n_shards("layers"), rules.chunks)))

    return _on_stages(split, layers, rules)


def from_chunks(chunks: Tree, rules: Rules) -> Tree:
    """The inverse of `to_chunks`."""
    there = rounds(rules.n_shards("layers"), rules.chunks)
    back = [[Move(*move[2:], *move[:2]) for move in moves] for moves in there]

    def join(a: jax.Array) -> jax.Array:
        a = _move(a, rules, back)
        return jnp.reshape(a, (-1, *a.shape[2:]))

    return _on_stages(join, chunks, rules)


def _move(a: jax.Array, rules: Rules, moves: list[list[Move]]) -> jax.Array:
    """The chunks [V, ...] of this stage after the moves."""
    if rules.chunks == 1:
        return a
    (axis,) = rules.mesh_axes("layers")
    here, out = lax.axis_index(axis), jnp.zeros_like(a)
    for one in moves:
        sent = {move.source: move.source_index for move in one}
        received = {move.target: move.target_index for move in one}
        sent, received = (jnp.asarray([at[i] for i in range(len(one))]) for at in (sent, received))
        chunk = lax.dynamic_slice_in_dim(a, sent[here], 1)
        chunk = lax.ppermute(chunk, axis, [(move.source, move.target) for move in one])
        out = lax.dynamic_update_slice_in_dim(out, chunk, received[here], 0)
    return out


def _on_stages(body, layers: Tree, rules: Rules) -> Tree:
    (axis,) = rules.mesh_axes("layers")
    mapped = jax.shard_map(
        body, in_specs=jax.P(axis), out_specs=jax.P(axis), axis_names={axis}, check_vma=False
    )
    return jax.tree.map(lambda a: mapped(shard_over_stages(a, axis)), layers)
