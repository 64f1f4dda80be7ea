"""Collectives around the products of a layer: its weights, and the residual stream between them.

The stream is sharded over the devices of `residual`.
"""

import math

import jax
from jax import lax
from jax.sharding import AxisType

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
