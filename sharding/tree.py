"""Shardings of whole trees: parameters, optimizer state, batches."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from sharding import memory

Tree = Any


def shardings(tree: Tree, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Tree:
    """NamedShardings of a tree of PartitionSpecs on `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda leaf: isinstance(leaf, jax.P)
    )


def reshard_tree(tree: Tree, specs: Tree) -> Tree:
    """Lays every leaf out as its PartitionSpec says; a leaf already there is passed through."""

    def lay(leaf: jax.Array, spec: jax.P) -> jax.Array:
        there = jax.typeof(leaf).sharding.is_equivalent_to(
            NamedSharding(jax.sharding.get_abstract_mesh(), spec), leaf.ndim
        )
        return leaf if there else jax.reshard(leaf, spec)  # jax.reshard copies in any case

    return jax.tree.map(lay, tree, specs)


def copy_tree(tree: Tree) -> Tree:
    """The same values and shardings in new buffers, which survive a donation of the old ones."""
    return jax.jit(lambda leaves: jax.tree.map(jnp.copy, leaves))(tree)


def put_batch(batch: Tree, spec: jax.P) -> Tree:
    """Host arrays onto the mesh that is set, all laid out as `spec` says.

    Every process passes the whole batch, and each device takes its slice of it.
    """
    sharding = NamedSharding(jax.sharding.get_mesh(), spec)

    def put(array: Any) -> jax.Array:
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, batch)


def on_mesh(tree: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """What `jax.eval_shape` found, with its abstract mesh replaced by that of the devices: only so does
    a program lowered for it serve the arrays themselves."""

    def leaf(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = jax.P() if a.sharding is None else a.sharding.spec
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, tree)


def bytes_per_device(tree: Tree) -> int:
    """Bytes that one device's own memory holds of a tree of (abstract) arrays with shardings."""

    def leaf_bytes(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and sharding.memory_kind == memory.KIND:
            return 0
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))
