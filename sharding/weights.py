"""Weights at their point of use."""

import math

import jax

from sharding.rules import Rules


def gather_matrix(
    w: jax.Array, rules: Rules, logical: tuple[str | None, ...], n_out: int
) -> jax.Array:
    """A weight [*out, *in] as the matrix [out, in], with the shards of its `w_embed` brought together.

    Where those shards lie on devices that hold other rows, each device has the gradient of its own rows
    only: it is then summed and cut in one reduce-scatter. Left to XLA, it is summed as a whole on every
    device and cut afterwards, because of the reshape between the two.
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
        if others:  # before the gather, so that a gradient is summed over them after it was cut
            matrix = jax.lax.pcast(matrix, others, to="reduced")
        return jax.lax.all_gather(matrix, axes, axis=dim, tiled=True, to="reduced")

    others = tuple(axis for axis in rows if axis not in axes)
    spec = jax.P(*flat, reduced=frozenset(rows))
    return jax.shard_map(local, in_specs=rules.spec(*logical), out_specs=spec)(w)
