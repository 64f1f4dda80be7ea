"""Offload of arrays to host memory; their sharding over the mesh stays the same."""

from typing import Any

import jax
from jax.sharding import NamedSharding

PyTree = Any

HOST_MEMORY_KIND = "pinned_host"


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
