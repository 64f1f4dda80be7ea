"""The residual stream between the products of a layer, sharded over the devices of `residual`."""

import jax
from jax import lax
from jax.sharding import AxisType

from sharding.rules import Rules


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
