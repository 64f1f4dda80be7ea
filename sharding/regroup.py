"""The devices of a mesh as a mesh of another shape, and trees of arrays brought from one to the other.

Both meshes are written on one fine mesh in the device order of the first, whose axes have prime sizes: an
axis of either is a product of fine axes. So one program lays a tree out anew on the devices, and a leaf that
lies right already is passed through. An axis keeps of its old place what the sizes allow, so that the part of
an array that a device needs is as far as possible one that it has.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.typing import DTypeLike

from sharding.mesh import MESH_AXES, axis_sizes
from sharding.tree import Tree

Leaf = jax.Array | jax.ShapeDtypeStruct
Fine = Mapping[str, tuple[str, ...]]  # mesh axis -> the fine axes that make it, slowest first


@dataclasses.dataclass(frozen=True)
class Regrouping:
    """The way of arrays from one mesh to another over its devices, or over those of this process."""

    mesh: Mesh  # where they go
    fine: Mesh
    old: Fine
    new: Fine

    def stays(self, leaf: Leaf, spec: jax.P, dtype: DTypeLike | None = None) -> bool:
        """Whether every device has of this leaf what `spec` gives it."""
        if leaf.dtype != _dtype(leaf, dtype):
            return False
        return self._source(leaf).is_equivalent_to(self._target(spec), len(leaf.shape))

    def reshard(self, tree: Tree, specs: Tree, dtype: DTypeLike | None = None) -> Tree:
        """The tree on `mesh`, laid out by its PartitionSpecs, floating numbers in `dtype` where one is given.
        Leaves that are so already share their buffers; all others come out of one program."""
        leaves, form = jax.tree.flatten(tree)
        wanted = form.flatten_up_to(specs)
        moving = [not self.stays(a, spec, dtype) for a, spec in zip(leaves, wanted, strict=True)]
        with jax.set_mesh(self.fine):
            args = [rewrap(a, self._source(a)) for a, m in zip(leaves, moving, strict=True) if m]
            moved = iter(lay_out(args, **self._how(wanted, moving, dtype)) if args else [])
        every = [next(moved) if m else a for a, m in zip(leaves, moving, strict=True)]
        pairs = zip(every, wanted, strict=True)
        return form.unflatten([rewrap(a, NamedSharding(self.mesh, spec)) for a, spec in pairs])

    def lower(self, tree: Tree, specs: Tree, dtype: DTypeLike | None = None) -> jax.stages.Lowered:
        """The program of `reshard` of an abstract tree of which not every leaf stays."""
        leaves, form = jax.tree.flatten(tree)
        wanted = form.flatten_up_to(specs)
        moving = [not self.stays(a, spec, dtype) for a, spec in zip(leaves, wanted, strict=True)]
        args = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._source(a))
            for a, m in zip(leaves, moving, strict=True)
            if m
        ]
        with jax.set_mesh(self.fine):
            return lay_out.lower(args, **self._how(wanted, moving, dtype))

    def _how(self, wanted: list[jax.P], moving: list[bool], dtype: DTypeLike | None) -> dict:
        specs = [self._target(s).spec for s, m in zip(wanted, moving, strict=True) if m]
        return {"specs": tuple(specs), "dtype": dtype}

    def _source(self, leaf: Leaf) -> NamedSharding:
        sharding: Any = leaf.sharding
        return NamedSharding(self.fine, _on_fine(sharding.spec, self.old))

    def _target(self, spec: jax.P) -> NamedSharding:
        return NamedSharding(self.fine, _on_fine(spec, self.new))


@functools.partial(jax.jit, static_argnames=("specs", "dtype"))
def lay_out(
    leaves: Sequence[jax.Array], *, specs: tuple[jax.P, ...], dtype: DTypeLike | None
) -> list[jax.Array]:
    """The leaves, each as its spec says, on the mesh that is set."""

    def lay(leaf: jax.Array, spec: jax.P) -> jax.Array:
        leaf = leaf.astype(_dtype(leaf, dtype))
        return jax.reshard(jax.reshard(leaf, _halfway(leaf, spec)), spec)

    return [lay(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]


def _dtype(leaf: Leaf, dtype: DTypeLike | None) -> DTypeLike:
    """What a leaf becomes."""
    return dtype if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype


def _halfway(leaf: jax.Array, spec: jax.P) -> jax.P:
    """The spec, with the cuts of the leaf that it does not have left where they divide. Devices first trade
    parts for this and gather then: left to XLA, each would gather all of the leaf to keep its part."""
    sizes = jax.sharding.get_abstract_mesh().shape
    if max(sizes.values()) > 2:  # XLA aborts where parts change places along an axis of three
        return spec
    now, then = (_by_dim(s, leaf.ndim) for s in (jax.typeof(leaf).sharding.spec, spec))
    used = {axis for axes in then for axis in axes}
    for size, before, axes in zip(leaf.shape, now, then, strict=True):
        for axis in before:
            if axis not in used and size % math.prod(sizes[a] for a in (*axes, axis)) == 0:
                axes.append(axis)
    return jax.P(*(tuple(axes) or None for axes in then))


def _by_dim(spec: jax.P, n_dims: int) -> list[list[str]]:
    """The axes that each dimension is cut over."""
    parts = [*spec, *[None] * (n_dims - len(spec))]
    return [[part] if isinstance(part, str) else list(part or ()) for part in parts]


def rewrap(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same buffers under a sharding that gives each device of this process what it has."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    places = sharding.addressable_devices_indices_map(array.shape)
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, [shards[device] for device in places]
    )


def regroup(mesh: Mesh, *, of_process: bool = False, **sizes: int) -> Regrouping:
    """The devices of `mesh`, or those of this process, as a mesh of these sizes (one may be -1).

    Raises ValueError where the sizes do not make the number of devices, or where the devices of each
    process are no block of the mesh.
    """
    fine, inside = _fine_mesh(mesh, of_process)
    full = axis_sizes(math.prod(n for own in inside.values() for n in own.values()), **sizes)
    new = _places(inside, full)
    order = [name for axis in MESH_AXES for name in new[axis]]
    names = list(fine.axis_names)
    here = np.argwhere(_process(fine) == jax.process_index())[0]
    index = [
        slice(None) if a in order else slice(i, i + 1) for a, i in zip(names, here, strict=True)
    ]
    across = [a for a in names if a not in order]  # processes
    places = [names.index(a) for a in (*across, *order)]
    devices = fine.devices[tuple(index)].transpose(places).reshape(*full.values())
    kinds = (AxisType.Explicit,) * len(MESH_AXES)
    old = {axis: tuple(_primes(axis, mesh.shape[axis])) for axis in MESH_AXES}
    return Regrouping(Mesh(devices, MESH_AXES, axis_types=kinds), fine, old, new)


def process_block(mesh: Mesh) -> dict[str, int]:
    """Sizes of the block of the mesh that each process's devices are. Raises ValueError where they are none."""
    _, inside = _fine_mesh(mesh, of_process=True)
    return {axis: math.prod(own.values()) for axis, own in inside.items()}


def _fine_mesh(mesh: Mesh, of_process: bool) -> tuple[Mesh, dict[str, dict[str, int]]]:
    """The mesh in prime axes, and of each axis those along which the devices of a process lie: all of
    them, where processes do not matter."""
    primes = {axis: _primes(axis, mesh.shape[axis]) for axis in MESH_AXES}
    sizes = {name: n for own in primes.values() for name, n in own.items()}
    sizes = sizes or {"one": 1}  # a mesh has an axis
    kinds = (AxisType.Explicit,) * len(sizes)
    fine = Mesh(mesh.devices.reshape(*sizes.values()), tuple(sizes), axis_types=kinds)
    if not of_process:
        return fine, primes
    process = _process(fine)
    own = [name for i, name in enumerate(sizes) if (process == process.take([0], axis=i)).all()]
    if math.prod(sizes[name] for name in own) * len(np.unique(process)) != mesh.size:
        raise ValueError("the devices of a process are no block of the mesh")
    return fine, {
        axis: {name: n for name, n in parts.items() if name in own}
        for axis, parts in primes.items()
    }


def _process(mesh: Mesh) -> np.ndarray:
    return np.vectorize(lambda device: device.process_index)(mesh.devices)


def _primes(axis: str, size: int) -> dict[str, int]:
    """Fine axes that make an axis, the slowest first. Two is the fastest: devices of a host are even."""
    primes, divisor = [], 2
    while size > 1:
        while size % divisor == 0:
            primes.insert(0, divisor)
            size //= divisor
        divisor += 1
    return {f"{axis}{i}": n for i, n in enumerate(primes)}


def _places(inside: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]) -> Fine:
    """The fine axes of each new axis: as many of its own, slowest first, as divide it, then others."""
    spare, missing, kept = {}, {}, {}
    for axis in MESH_AXES:
        rest, kept[axis] = sizes[axis], []
        for name, n in inside[axis].items():
            if rest % n == 0:
                kept[axis].append(name)
                rest //= n
            else:
                spare[name] = n
        missing[axis] = rest
    for axis in reversed(MESH_AXES):  # the fastest take the closest devices
        taken = []
        for name, n in reversed(list(spare.items())):
            if missing[axis] % n == 0:
                missing[axis] //= n
                taken.insert(0, name)
                del spare[name]
        kept[axis] += taken
    return {axis: tuple(names) for axis, names in kept.items()}


def _on_fine(spec: jax.P, axes: Fine) -> jax.P:
    """The spec in fine axes."""

    parts = _by_dim(spec, len(spec))
    return jax.P(*(tuple(fine for axis in part for fine in axes[axis]) or None for part in parts))
