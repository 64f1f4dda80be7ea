"""Whole trees on devices: copies, batches, abstract trees, bytes per device."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from sharding import memory
from sharding.memory import PyTree


def copy_tree(tree: PyTree) -> PyTree:
    """A copy with the same values and shardings in new buffers, which survive a donation."""
    return jax.jit(lambda leaves: jax.tree.map(jnp.copy, leaves))(tree)


def put_batch(batch: PyTree, spec: jax.P) -> PyTree:
    """Puts a tree of host arrays onto the current mesh, each array sharded by `spec`.

    Every process passes the whole batch, and each device takes its slice of it.
    """
    sharding = NamedSharding(jax.sharding.get_mesh(), spec)

    def put(array: Any) -> jax.Array:
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, batch)


def on_mesh(tree: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """A result of `jax.eval_shape` with its abstract mesh replaced by the device mesh `mesh`.

    Only a program that is lowered with the device mesh accepts the arrays themselves. Of arrays on
    that mesh it gives the shapes.
    """

    def leaf(a: jax.ShapeDtypeStruct | jax.Array) -> jax.ShapeDtypeStruct:
        sharding: Any = a.sharding
        spec = jax.P() if sharding is None else sharding.spec
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, tree)


def bytes_per_device(tree: PyTree) -> int:
    """Bytes of device memory that one device needs for a tree of (abstract) arrays with shardings.

    Arrays in host memory count nothing.
    """
    return _bytes(tree, on_host=False)


def host_bytes_per_device(tree: PyTree) -> int:
    """Bytes of host memory that the tree's arrays there take for one device."""
    return _bytes(tree, on_host=True)


def _bytes(tree: PyTree, *, on_host: bool) -> int:
    def leaf_bytes(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        kind = None if sharding is None else sharding.memory_kind
        if (kind == memory.HOST_MEMORY_KIND) != on_host:
            return 0
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))
