"""Sums of gradients in host memory (learner.offload=gradients).

Between micro-batches the device has no sums. A micro-batch's gradient is added slice by slice: a
slice of the sums is copied to the device, added to and copied back before the next one is read. The
norm is summed on the way, without a further transfer. The optimizer step reads the
sums layer by layer (optimizers/layerwise.py).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.learner.optimizers.slices import put_slice, slice_count, take_slice
from jaxrl.types import Tree
from sharding import to_device, to_host


def add_gradients(sums: Tree, grads: Tree) -> tuple[Tree, Float[Array, ""]]:
    """(sums + grads in host memory, squared norm of the new sums).

    `sums` are float32 in host memory, `grads` of any float dtype on the device. A tensor whose
    first axis is sharded, such as layers in pipeline stages, is one slice.
    """
    leaves, structure = jax.tree.flatten(sums)
    pairs = list(zip(leaves, jax.tree.leaves(grads), strict=True))
    squares, done = jnp.zeros(()), []
    for total, grad in reversed(pairs):  # backward computes the last layer's gradient first
        # A tensor is read after the one before is written.
        (total, grad), squares = jax.lax.optimization_barrier(((total, grad), squares))
        total, squares = _add_tensor(total, grad, squares)
        done.append(total)
    return jax.tree.unflatten(structure, done[::-1]), squares


def _add_tensor(
    total: jax.Array, grad: jax.Array, squares: jax.Array
) -> tuple[jax.Array, jax.Array]:
    n_slices = slice_count(total)

    def add(i: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, squares = so_far
        old = to_device(take_slice(total, i, n_slices))
        new = old + take_slice(grad, i, n_slices).astype(old.dtype)
        return put_slice(total, to_host(new), i), squares + jnp.sum(new * new)

    return jax.lax.fori_loop(0, n_slices, add, (total, squares))
