"""Rows that are sharded over time exchange tokens for heads before a layer, and back after it.

Each device then has whole rows of some heads (Ulysses, https://arxiv.org/abs/2309.14509), in the
order of the row also if the mesh has rows in zig-zag order for ring attention. A state handed from
device to device would make all but one of them wait.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from sharding import Rules


def whole_row_rules(rules: Rules) -> Rules:
    """Rules of whole rows: the devices that share a row share its heads."""
    axes = rules.mesh_axes("attn_heads")
    axes += tuple(axis for axis in rules.mesh_axes("time") if axis not in axes)
    heads = axes or None
    return dataclasses.replace(
        rules, time=None, heads=heads, kv_heads=heads, attn_heads=heads, ring=False, ulysses=1
    )


def to_whole_rows(x: Shaped[Array, "B T N ..."], rules: Rules) -> Shaped[Array, "B T N2 ..."]:
    """Whole rows of a device's heads, in row order.

    Heads are repeated as often as the number of devices needs, in place: 0 0 1 1. Raises ValueError
    if the devices of one head would share it unevenly.
    """
    inside = whole_row_rules(rules)
    if rules.mesh_axes("time"):
        x = _repeat_heads(x, math.lcm(x.shape[2], inside.n_shards("heads")), rules)
    x = jax.reshard(x, inside.spec("batch", "time", "heads"))
    if not rules.ring:
        return x
    B, T, *rest = x.shape
    chunks = x.reshape(B, rules.ring_size, 2, T // (2 * rules.ring_size), *rest)
    halves = [chunks[:, :, 0], jnp.flip(chunks[:, :, 1], axis=1)]
    return jnp.concatenate(halves, axis=1).reshape(x.shape)


def from_whole_rows(x: Shaped[Array, "B T N ..."], rules: Rules) -> Shaped[Array, "B T N ..."]:
    """The inverse of `to_whole_rows`, without its repetitions."""
    if rules.ring:
        B, T, *rest = x.shape
        n = rules.ring_size
        halves = x.reshape(B, 2, n, T // (2 * n), *rest)
        x = jnp.stack([halves[:, 0], jnp.flip(halves[:, 1], axis=1)], axis=2).reshape(x.shape)
    return jax.reshard(x, rules.spec("batch", "time", "heads"))


def _repeat_heads(x, n_heads: int, rules: Rules):
    B, T, N, *rest = x.shape
    if n_heads == N:
        return x
    none = [None] * len(rest)
    copies = (B, T, N, n_heads // N, *rest)
    dims = (0, 1, 2, *range(4, 4 + len(rest)))
    spec = rules.spec("batch", "time", "heads", None, *none)
    wide = jax.lax.broadcast_in_dim(x, copies, dims, out_sharding=spec)
    out = rules.spec("batch", "time", "heads", *none)
    return jnp.reshape(wide, (B, T, n_heads, *rest), out_sharding=out)
