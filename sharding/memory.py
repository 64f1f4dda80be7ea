"""Arrays that wait in the memory of their devices' host, cut over the mesh as ever."""

from typing import Any

import jax

Tree = Any
KIND = "pinned_host"


def check_host_memory() -> None:
    """Raises ValueError where the devices cannot put arrays there."""
    kinds = [memory.kind for memory in jax.local_devices()[0].addressable_memories()]
    if KIND not in kinds:
        raise ValueError(
            f"config.learner.offload needs devices with {KIND} memory; {jax.local_devices()[0].device_kind} has "
            f"{', '.join(kinds)}; set config.learner.offload=()"
        )


def to_host(tree: Tree) -> Tree:
    """A tree of arrays, or of their shapes with shardings, that lies with the host. Scalars stay."""

    def move(leaf: Any) -> Any:
        if not leaf.ndim:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            assert leaf.sharding is not None
            there = leaf.sharding.with_memory_kind(KIND)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there)
        return jax.device_put(leaf, jax.memory.Space.Host)

    return jax.tree.map(move, tree)


def to_device(tree: Tree) -> Tree:
    """The tree on its devices; what is there already is passed through."""
    return jax.tree.map(
        lambda a: jax.device_put(a, jax.memory.Space.Device) if waits(a) else a, tree
    )


def back(tree: Tree, before: Tree) -> Tree:
    """`tree` where `before` lies, leaf by leaf."""
    return jax.tree.map(lambda a, b: jax.device_put(a, jax.typeof(b).memory_space), tree, before)


def waits(a: jax.Array) -> bool:
    return jax.typeof(a).memory_space == jax.memory.Space.Host
