"""Shardings of whole trees: parameters, optimizer state, batches."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

Tree = Any


def shardings(tree: Tree, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Tree:
    """NamedShardings of a tree of PartitionSpecs on `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda leaf: isinstance(leaf, jax.P)
    )


def reshard_tree(tree: Tree, specs: Tree) -> Tree:
    """Lays every leaf out as its PartitionSpec says; a leaf already there is passed through."""
    return jax.tree.map(jax.reshard, tree, specs)


def bytes_per_device(tree: Tree) -> int:
    """Bytes that one device holds of a tree of (abstract) arrays with shardings."""

    def leaf_bytes(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))
