"""Weights at their point of use."""

import math

import jax

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
            matrix = jax.lax.pcast(matrix, others, to="reduced")
        return jax.lax.all_gather(matrix, axes, axis=dim, tiled=True, to="reduced")

    others = tuple(axis for axis in rows if axis not in axes)
    spec = jax.P(*flat, reduced=frozenset(rows))
    return jax.shard_map(local, in_specs=rules.spec(*logical), out_specs=spec)(w)
