"""Resharding of trees from one mesh to a mesh of another shape over the same devices.

Both meshes are expressed on one factored mesh: the devices in the order of the first mesh, with
axes of prime size. An axis of either mesh is a product of these factors, so one compiled program
can reshard a tree, and a leaf whose sharding does not change is passed through. An axis keeps as
many of its old factors as its size allows, so that a device already has most of what it needs.

The program works in groups of layers, one after the other: its temporaries are one group's.
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
from sharding.tree import PyTree

Leaf = jax.Array | jax.ShapeDtypeStruct
# Resharded at a time, on a device of the destination. On TPU a gathered array is copied to the
# result except in a loop, so only small ones are gathered without one.
GROUP_BYTES = {"tpu": 32 * 2**20}
GROUP_BYTES_ELSEWHERE = 512 * 2**20
Factors = Mapping[str, tuple[str, ...]]  # mesh axis -> its axes of the factored mesh, slowest first


@dataclasses.dataclass(frozen=True)
class Resharding:
    """Moves arrays from one mesh to `mesh`, over the same devices or this process's."""

    mesh: Mesh  # destination
    factored_mesh: Mesh
    source_factors: Factors
    target_factors: Factors
    group_bytes: int = GROUP_BYTES_ELSEWHERE

    def shares_buffers(self, leaf: Leaf, spec: jax.P, dtype: DTypeLike | None = None) -> bool:
        """Whether this leaf keeps its buffers: each device already has its shard under `spec`."""
        if leaf.dtype != _dtype(leaf, dtype):
            return False
        return self._source(leaf).is_equivalent_to(self._target(spec), len(leaf.shape))

    def reshard(self, tree: PyTree, specs: PyTree, dtype: DTypeLike | None = None) -> PyTree:
        """The tree on `mesh`, sharded by its PartitionSpecs, with floating-point leaves in `dtype`.

        Leaves that match already share their buffers; one program computes all others.
        """
        leaves, form = jax.tree.flatten(tree)
        wanted = form.flatten_up_to(specs)
        moving = [
            not self.shares_buffers(a, spec, dtype) for a, spec in zip(leaves, wanted, strict=True)
        ]
        with jax.set_mesh(self.factored_mesh):
            args = [
                with_sharding(a, self._source(a)) for a, m in zip(leaves, moving, strict=True) if m
            ]
            moved = iter(
                reshard_leaves(args, **self._static_args(wanted, moving, dtype)) if args else []
            )
        every = [next(moved) if m else a for a, m in zip(leaves, moving, strict=True)]
        pairs = zip(every, wanted, strict=True)
        return form.unflatten(
            [with_sharding(a, NamedSharding(self.mesh, spec)) for a, spec in pairs]
        )

    def lower(
        self, tree: PyTree, specs: PyTree, dtype: DTypeLike | None = None
    ) -> jax.stages.Lowered:
        """The program of `reshard` for an abstract tree. At least one leaf must move."""
        leaves, form = jax.tree.flatten(tree)
        wanted = form.flatten_up_to(specs)
        moving = [
            not self.shares_buffers(a, spec, dtype) for a, spec in zip(leaves, wanted, strict=True)
        ]
        args = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._source(a))
            for a, m in zip(leaves, moving, strict=True)
            if m
        ]
        with jax.set_mesh(self.factored_mesh):
            return reshard_leaves.lower(args, **self._static_args(wanted, moving, dtype))

    def _static_args(
        self, wanted: list[jax.P], moving: list[bool], dtype: DTypeLike | None
    ) -> dict:
        specs = [self._target(s).spec for s, m in zip(wanted, moving, strict=True) if m]
        return {"specs": tuple(specs), "dtype": dtype, "group_bytes": self.group_bytes}

    def _source(self, leaf: Leaf) -> NamedSharding:
        sharding: Any = leaf.sharding
        return NamedSharding(self.factored_mesh, _factored_spec(sharding.spec, self.source_factors))

    def _target(self, spec: jax.P) -> NamedSharding:
        return NamedSharding(self.factored_mesh, _factored_spec(spec, self.target_factors))


@functools.partial(jax.jit, static_argnames=("specs", "dtype", "group_bytes"))
def reshard_leaves(
    leaves: Sequence[jax.Array],
    *,
    specs: tuple[jax.P, ...],
    dtype: DTypeLike | None,
    group_bytes: int,
) -> list[jax.Array]:
    """The leaves, each sharded by its spec on the current mesh.

    Small ones are resharded together, up to `group_bytes` of the results on a device. Of larger
    ones, such as stacked layers and tables, a loop takes so many rows of a device's leading axis at
    a time.
    """

    def reshard(leaf: jax.Array, spec: jax.P) -> jax.Array:
        leaf = leaf.astype(_dtype(leaf, dtype))
        return jax.reshard(jax.reshard(leaf, _intermediate_spec(leaf, spec)), spec)

    done: list[jax.Array] = []
    n_bytes = last_group = 0
    for leaf, spec in zip(leaves, specs, strict=True):
        size = _result_bytes(leaf, spec, dtype)
        if n_bytes and n_bytes + size > group_bytes:  # start after the group before is complete
            leaf, done[last_group:] = jax.lax.optimization_barrier((leaf, done[last_group:]))
            n_bytes, last_group = 0, len(done)
        n_bytes += size
        n_parts = _n_parts(leaf, spec, -(-size // group_bytes))
        if n_parts == 1:
            done.append(reshard(leaf, spec))
            continue
        first, *rest = (*spec, *[None] * (leaf.ndim - len(spec)))
        parts = _split_leading(leaf, n_parts)
        moved = jax.lax.map(functools.partial(reshard, spec=jax.P(first, None, *rest)), parts)
        done.append(jnp.moveaxis(moved, 0, 1).reshape(leaf.shape, out_sharding=spec))
    return done


def _result_bytes(leaf: jax.Array, spec: jax.P, dtype: DTypeLike | None) -> int:
    """Bytes of the resharded leaf on a device of the current mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    n = math.prod(sizes[axis] for axes in _by_dim(spec, leaf.ndim) for axis in axes)
    return leaf.size * jnp.dtype(_dtype(leaf, dtype)).itemsize // n


def _n_parts(leaf: jax.Array, spec: jax.P, at_least: int) -> int:
    """The smallest divisor of a device's leading axis that is `at_least` so large.

    1 if the sharding of this axis changes.
    """
    now, then = (_by_dim(s, leaf.ndim) for s in (jax.typeof(leaf).sharding.spec, spec))
    if at_least == 1 or not leaf.ndim or now[0] != then[0]:
        return 1
    size = leaf.shape[0] // _n_leading_shards(leaf)
    return next((n for n in range(at_least, size) if size % n == 0), size)


def _n_leading_shards(leaf: jax.Array) -> int:
    """Devices that share the leading axis."""
    sizes, spec = jax.sharding.get_abstract_mesh().shape, jax.typeof(leaf).sharding.spec
    return math.prod(sizes[axis] for axis in _by_dim(spec, leaf.ndim)[0])


def _split_leading(leaf: jax.Array, n_parts: int) -> jax.Array:
    """[n, ...] as [parts, shards, rows, ...], of the rows that every device has."""
    first, *rest = (*jax.typeof(leaf).sharding.spec, *[None] * leaf.ndim)[: leaf.ndim]
    shape = (_n_leading_shards(leaf), n_parts, -1, *leaf.shape[1:])
    parts = leaf.reshape(shape, out_sharding=jax.P(first, None, None, *rest))
    return jnp.moveaxis(parts, 1, 0)


def _dtype(leaf: Leaf, dtype: DTypeLike | None) -> DTypeLike:
    """Dtype of a leaf after resharding; integers keep theirs."""
    return dtype if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype


def _intermediate_spec(leaf: jax.Array, spec: jax.P) -> jax.P:
    """`spec` with those shardings of the leaf added that `spec` lacks, where sizes divide.

    Devices first exchange parts to reach this spec and then all-gather. Left to XLA, each device
    would all-gather the whole leaf and keep a part.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    if max(sizes.values()) > 2:  # XLA aborts on an all-to-all along an axis of three
        return spec
    now, then = (_by_dim(s, leaf.ndim) for s in (jax.typeof(leaf).sharding.spec, spec))
    used = {axis for axes in then for axis in axes}
    for size, before, axes in zip(leaf.shape, now, then, strict=True):
        for axis in before:
            if axis not in used and size % math.prod(sizes[a] for a in (*axes, axis)) == 0:
                axes.append(axis)
    return jax.P(*(tuple(axes) or None for axes in then))


def _by_dim(spec: jax.P, n_dims: int) -> list[list[str]]:
    """The axes that shard each dimension."""
    parts = [*spec, *[None] * (n_dims - len(spec))]
    return [[part] if isinstance(part, str) else list(part or ()) for part in parts]


def with_sharding(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same buffers under another sharding, which must give each local device the same shard."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    devices = sharding.addressable_devices_indices_map(array.shape)
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, [shards[device] for device in devices]
    )


def reshape_mesh(mesh: Mesh, *, per_process: bool = False, **sizes: int) -> Resharding:
    """Resharding to a mesh of these sizes (one may be -1) over the devices of `mesh`.

    With `per_process` the new mesh has only the devices of this process. Raises ValueError if the
    product of the sizes is not the number of devices, or if the devices of each process are not a
    block of the mesh.
    """
    factored, inside = _factored_mesh(mesh, per_process)
    n_devices = math.prod(n for factors in inside.values() for n in factors.values())
    full = axis_sizes(n_devices, **sizes)
    target = _assign_factors(inside, full)
    order = [name for axis in MESH_AXES for name in target[axis]]
    names = list(factored.axis_names)
    here = np.argwhere(_process_indices(factored) == jax.process_index())[0]
    index = [
        slice(None) if a in order else slice(i, i + 1) for a, i in zip(names, here, strict=True)
    ]
    across = [a for a in names if a not in order]  # factors that span processes
    dims = [names.index(a) for a in (*across, *order)]
    devices = factored.devices[tuple(index)].transpose(dims).reshape(*full.values())
    kinds = (AxisType.Explicit,) * len(MESH_AXES)
    source = {axis: tuple(factors) for axis, factors in _axis_factors(mesh).items()}
    group_bytes = GROUP_BYTES.get(devices.flat[0].platform, GROUP_BYTES_ELSEWHERE)
    made = Mesh(devices, MESH_AXES, axis_types=kinds)
    return Resharding(made, factored, source, target, group_bytes)


def process_mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """Axis sizes of the block of the mesh that the devices of each process form.

    Raises ValueError if they do not form a block.
    """
    _, inside = _factored_mesh(mesh, per_process=True)
    return {axis: math.prod(factors.values()) for axis, factors in inside.items()}


def _factored_mesh(mesh: Mesh, per_process: bool) -> tuple[Mesh, dict[str, dict[str, int]]]:
    """The mesh with axes of prime size, and {axis: {factor: size}} of the new mesh's devices.

    With `per_process` these are the factors along which the devices of one process vary, else all.
    """
    primes = _axis_factors(mesh)
    sizes = {name: n for factors in primes.values() for name, n in factors.items()}
    sizes = sizes or {"one": 1}  # a mesh needs an axis
    kinds = (AxisType.Explicit,) * len(sizes)
    factored = Mesh(mesh.devices.reshape(*sizes.values()), tuple(sizes), axis_types=kinds)
    if not per_process:
        return factored, primes
    process = _process_indices(factored)
    local = [name for i, name in enumerate(sizes) if (process == process.take([0], axis=i)).all()]
    if math.prod(sizes[name] for name in local) * len(np.unique(process)) != mesh.size:
        raise ValueError("the devices of a process are no block of the mesh")
    return factored, {
        axis: {name: n for name, n in factors.items() if name in local}
        for axis, factors in primes.items()
    }


def _process_indices(mesh: Mesh) -> np.ndarray:
    return np.vectorize(lambda device: device.process_index)(mesh.devices)


def _axis_factors(mesh: Mesh) -> dict[str, dict[str, int]]:
    """{axis: {factor: prime}} of the mesh, slowest first.

    The fastest factors are those of the part of an axis that is in one process, if there is one.
    """
    process, factors = _process_indices(mesh), {}
    for i, axis in enumerate(mesh.axis_names):
        size = mesh.shape[axis]
        line = np.moveaxis(process, i, 0).reshape(size, -1)[:, 0]
        local = int(np.argmax(line != line[0])) or size
        local = local if size % local == 0 else 1
        primes = _primes(size // local) + _primes(local)
        factors[axis] = {f"{axis}{number}": prime for number, prime in enumerate(primes)}
    return factors


def _primes(size: int) -> list[int]:
    """Prime factors, the largest first. Two is fastest: hosts have even counts."""
    primes, divisor = [], 2
    while size > 1:
        while size % divisor == 0:
            primes.insert(0, divisor)
            size //= divisor
        divisor += 1
    return primes


def _assign_factors(inside: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]) -> Factors:
    """Factors of each new axis: as many of its old ones as divide it, then spare ones."""
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
    for axis in reversed(MESH_AXES):  # the fastest axes take the closest devices
        taken = []
        for name, n in reversed(list(spare.items())):
            if missing[axis] % n == 0:
                missing[axis] //= n
                taken.insert(0, name)
                del spare[name]
        kept[axis] += taken
    return {axis: tuple(names) for axis, names in kept.items()}


def _factored_spec(spec: jax.P, factors: Factors) -> jax.P:
    """`spec` on the factored mesh."""
    parts = _by_dim(spec, len(spec))
    return jax.P(*(tuple(f for axis in part for f in factors[axis]) or None for part in parts))
