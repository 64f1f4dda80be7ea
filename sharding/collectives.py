"""Collectives around the products of a layer: its weights, and the residual stream between them.

The stream is sharded over the devices of `residual`.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from sharding.mesh import target_platform
from sharding.rules import Rules


def gather_matrix(
    w: jax.Array, rules: Rules, logical: tuple[str | None, ...], n_out: int
) -> jax.Array:
    """All-gathers the `w_embed` shards of a weight [*out, *in]; returns it as a matrix [out, in].

    If the devices that hold these shards have different batch rows, each has the gradient of its
    own rows only, and backward needs one reduce-scatter. Left to XLA, the reshape between gather
    and use turns it into an all-reduce of the whole gradient followed by a slice.
    """
    flat = rules.gathered(logical[0], logical[n_out])
    axes = rules.mesh_axes("w_embed") if "w_embed" in logical else ()
    rows = (*rules.mesh_axes("batch"), *rules.mesh_axes("time"))
    mesh = jax.sharding.get_abstract_mesh()
    if not (set(axes) <= set(rows) and any(mesh.shape[axis] > 1 for axis in axes)):
        w = jax.reshard(w, rules.gathered(*logical))
        return w.reshape(-1, math.prod(w.shape[n_out:]), out_sharding=flat)
    dim = 0 if logical.index("w_embed") < n_out else 1

    def local(w: jax.Array) -> jax.Array:
        matrix = w.reshape(math.prod(w.shape[:n_out]), -1)
        if others:  # before the gather, so that backward reduce-scatters before it sums over these
            matrix = lax.pcast(matrix, others, to="reduced")
        return lax.all_gather(matrix, axes, axis=dim, tiled=True, to="reduced")

    others = tuple(axis for axis in rows if axis not in axes)
    spec = jax.P(*flat, reduced=frozenset(rows))
    return jax.shard_map(local, in_specs=rules.spec(*logical), out_specs=spec)(w)


def gather_shards(w: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """shard_map body: the shards of `axes` joined along a dimension.

    XLA on GPU gathers only along the major dimension in memory. For another one it would choose
    that memory order, also for the stack of all layers from which a loop takes `w`: a transposed
    copy of the weights of all layers, and of their gradients. There the shards get a leading
    dimension of their number, and only the result is transposed.
    """
    if target_platform() != "gpu" or dim == 0:
        return lax.all_gather(w, axes, axis=dim, tiled=True)
    parts = jnp.moveaxis(lax.all_gather(w, axes), 0, dim)
    return parts.reshape(*w.shape[:dim], -1, *w.shape[dim + 1 :])


def gather_rows(
    table: jax.Array, indices: jax.Array, rules: Rules, logical: tuple[str | None, str | None]
) -> jax.Array:
    """Rows [B, T, F] of a table [V, F] at `indices` [B, T]; no device holds more than its shard.

    A device reads its part of the rows of all devices that share the features ("w_embed"), and
    these devices exchange the parts. Backward sends them back and adds them to the shard, so no
    gradient of the whole table exists either. Rows of other shards of the first axis are zeros in
    a sum over them.
    """
    tokens, out = rules.spec("batch", "time"), rules.spec("batch", "time", None)
    if rules.n_shards("w_embed") == 1:
        table = jax.reshard(table, rules.gathered(*logical))
        return table.at[indices].get(out_sharding=out)
    axes, rows = rules.mesh_axes("w_embed"), rules.mesh_axes("batch") + rules.mesh_axes("time")
    vocab = rules.mesh_axes(logical[0]) if logical[0] else ()
    exchange = set(axes) <= set(rows)  # else the devices have the same rows

    def local(table: jax.Array, indices: jax.Array) -> jax.Array:
        flat = indices.reshape(-1)
        if exchange:
            flat = lax.all_gather(flat, axes, tiled=True)
        if vocab:
            flat = flat - lax.axis_index(vocab) * len(table)
        inside = (flat >= 0) & (flat < len(table))
        part = jnp.where(inside[:, None], table[jnp.where(inside, flat, 0)], 0)
        part = lax.psum(part, vocab) if vocab else part
        if exchange:
            part = lax.all_to_all(part, axes, split_axis=0, concat_axis=1, tiled=True)
        return part.reshape(*indices.shape, -1)

    specs = rules.spec(*logical), tokens
    found = out if exchange else rules.spec("batch", "time", "w_embed")
    mapped = jax.shard_map(local, in_specs=specs, out_specs=found)
    return jax.reshard(mapped(table, jax.reshard(indices, tokens)), out)


def gather_residual(x: jax.Array, rules: Rules) -> jax.Array:
    """The residual stream [B, T, D] as the input of sharded weights (`Rules.gathered_residual`)."""
    spec, whole = jax.typeof(x).sharding.spec, rules.gathered_residual()
    if not (axes := _axes_in_stage(rules)):
        return jax.reshard(x, whole)
    dim = _sharded_dim(spec, axes)

    def local(x: jax.Array) -> jax.Array:
        if dim is None:
            return lax.pcast(x, axes, to="reduced")
        return lax.all_gather(x, axes, axis=dim, tiled=True, to="reduced")

    return jax.shard_map(local, in_specs=spec, out_specs=whole)(x)


def scatter_residual(y: jax.Array, rules: Rules) -> jax.Array:
    """The output [B, T, D] of sharded weights (`Rules.partial_residual`), summed and sharded."""
    spec, out = jax.typeof(y).sharding.spec, rules.residual_spec(y.shape)
    if not (axes := _axes_in_stage(rules)):
        return jax.reshard(y, out)
    dim = _sharded_dim(out, axes)

    def local(y: jax.Array) -> jax.Array:
        if dim is None:
            return lax.psum(y, axes)
        return lax.psum_scatter(y, axes, scatter_dimension=dim, tiled=True)

    return jax.shard_map(local, in_specs=spec, out_specs=out)(y)


def _axes_in_stage(rules: Rules) -> tuple[str, ...]:
    """The axes of `residual` inside a pipeline stage, else none.

    There the collectives are written out: XLA aborts on the reshard of an unreduced array.
    """
    in_stage = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    return rules.mesh_axes("residual") if in_stage else ()


def _sharded_dim(spec: jax.P, axes: tuple[str, ...]) -> int | None:
    """The dimension that `axes` shard, or None."""
    names = [one if isinstance(one, tuple) else (one,) for one in spec]
    return next((dim for dim, one in enumerate(names) if set(axes) <= set(one)), None)
