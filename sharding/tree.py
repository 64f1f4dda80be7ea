"""Whole trees of arrays: copies, abstract trees, offload to host memory, bytes per device."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

PyTree = Any

HOST_MEMORY_KIND = "pinned_host"


def copy_tree(tree: PyTree) -> PyTree:
    """A copy with the same values and shardings in new buffers, which survive a donation."""
    return jax.jit(lambda leaves: jax.tree.map(jnp.copy, leaves))(tree)


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


def check_host_memory(keys: str) -> None:
    """Raises ValueError, which names the `keys`, if devices cannot place arrays in host memory."""
    kinds = [memory.kind for memory in jax.local_devices()[0].addressable_memories()]
    if HOST_MEMORY_KIND not in kinds:
        device_kind = jax.local_devices()[0].device_kind
        raise ValueError(
            f"{keys} needs devices with {HOST_MEMORY_KIND} memory; {device_kind} has "
            f"{', '.join(kinds)}; leave it out"
        )


def to_host(tree: PyTree) -> PyTree:
    """The tree in host memory; scalars stay. Leaves are arrays, or shapes with shardings."""

    def move(leaf: Any) -> Any:
        if not leaf.ndim:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            assert isinstance(leaf.sharding, NamedSharding)
            sharding = leaf.sharding.with_memory_kind(HOST_MEMORY_KIND)
            if sharding.memory_kind is None:  # descriptions of GPUs do not list their memories
                mesh = leaf.sharding.mesh.abstract_mesh
                sharding = NamedSharding(mesh, leaf.sharding.spec, memory_kind=HOST_MEMORY_KIND)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, jax.memory.Space.Host)

    return jax.tree.map(move, tree)


def to_device(tree: PyTree) -> PyTree:
    """The tree in device memory. Leaves that are there already are passed through."""
    return jax.tree.map(
        lambda a: jax.device_put(a, jax.memory.Space.Device) if is_on_host(a) else a, tree
    )


def restore_memory_space(tree: PyTree, like: PyTree) -> PyTree:
    """`tree`, from device memory, with each leaf in the memory space of the leaf of `like`."""
    return jax.tree.map(
        lambda a, b: jax.device_put(a, jax.memory.Space.Host) if is_on_host(b) else a, tree, like
    )


def is_on_host(a: jax.Array) -> bool:
    return jax.typeof(a).memory_space == jax.memory.Space.Host


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
        if (kind == HOST_MEMORY_KIND) != on_host:
            return 0
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))
