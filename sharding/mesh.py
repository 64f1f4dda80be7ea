"""The one device mesh. Every axis is always present; an axis that is not used has size 1."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType

# Slowest-varying first: replicas may sit on other slices, tensor shards want the closest neighbours.
MESH_AXES = ("stage", "replica", "fsdp", "expert", "sequence", "tensor")
ONE_TOKEN = ("stage", "sequence", "tensor")  # axes whose devices work on one token together


def axis_sizes(n_devices: int, **sizes: int) -> dict[str, int]:
    """Sizes of all six axes; at most one given size may be -1 and takes the devices that are left.

    Raises ValueError if an axis is unknown or the product is not `n_devices`.
    """
    if unknown := sizes.keys() - set(MESH_AXES):
        raise ValueError(
            f"unknown mesh axes {sorted(unknown)}; the axes are {', '.join(MESH_AXES)}"
        )
    full = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    open_axes = [axis for axis, size in full.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"mesh axes {open_axes} are both -1; give all but one of them a size")
    if bad := {axis: size for axis, size in full.items() if size < 1 and size != -1}:
        raise ValueError(f"mesh sizes must be positive, got {bad}; set 1 for an unused axis")
    fixed = math.prod(size for size in full.values() if size != -1)
    if open_axes:
        full[open_axes[0]] = max(n_devices // fixed, 1)
    if math.prod(full.values()) != n_devices:
        shown = " x ".join(f"{axis} {size}" for axis, size in full.items() if size != 1) or "1"
        raise ValueError(
            f"the mesh ({shown}) needs {math.prod(full.values())} devices but there are {n_devices}; "
            f"set one of the config.mesh sizes to -1 to take what is left"
        )
    return full


def make_mesh(devices: Sequence[Any] | None = None, **sizes: int) -> jax.sharding.Mesh:
    """An explicit-mode mesh over `devices` (default: all); axes left out have size 1.

    `make_mesh()` is one device, `make_mesh(fsdp=-1)` is all of them.
    """
    if devices is None:
        devices = jax.devices()
        if -1 not in sizes.values():
            devices = devices[: math.prod(sizes.values())]
    full = axis_sizes(len(devices), **sizes)
    kinds = (AxisType.Explicit,) * len(MESH_AXES)
    # jax.make_mesh refuses 8 x 8 on a torus of 4 x 4 x 4.
    order = mesh_utils.create_device_mesh(
        tuple(full.values()), devices, allow_split_physical_axes=True
    )
    return jax.sharding.Mesh(order, MESH_AXES, axis_types=kinds)


def abstract_mesh(n_devices: int, **sizes: int) -> AbstractMesh:
    """The same mesh without devices: shapes and shardings can be checked against it anywhere."""
    full = axis_sizes(n_devices, **sizes)
    kinds = (AxisType.Explicit,) * len(MESH_AXES)
    return AbstractMesh(tuple(full.values()), MESH_AXES, axis_types=kinds)


def split_by_process(
    mesh: jax.sharding.Mesh,
) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
    """(the mesh of this process's devices, all devices with an axis "process" before those axes).

    A layout on the first, put on the second, gives every process a copy of its own. Raises ValueError where
    a process's devices are no block of the mesh, or lack some of those that work on one token together.
    """
    of_process: dict[int, list[tuple[int, ...]]] = {}
    for place in np.ndindex(mesh.devices.shape):
        device: Any = mesh.devices[place]
        of_process.setdefault(device.process_index, []).append(place)
    blocks = {}
    for process, places in of_process.items():
        along = [np.unique(column) for column in np.transpose(places)]
        if math.prod(map(len, along)) != len(places):
            raise ValueError(f"the devices of process {process} are no block of the mesh")
        blocks[process] = mesh.devices[np.ix_(*along)]
    own = blocks[jax.process_index()]
    if len({block.shape for block in blocks.values()}) > 1:
        raise ValueError("the processes have blocks of the mesh of different shapes")
    sizes = dict(zip(mesh.axis_names, own.shape, strict=True))
    torn = {axis: mesh.shape[axis] for axis in ONE_TOKEN if sizes[axis] != mesh.shape[axis]}
    if torn:
        raise ValueError(f"a process has {own.size} devices, which do not hold the whole of {torn}")
    copies = np.stack([blocks[process] for process in sorted(blocks)])
    kinds = mesh.axis_types
    return (
        jax.sharding.Mesh(own, mesh.axis_names, axis_types=kinds),
        jax.sharding.Mesh(copies, ("process", *mesh.axis_names), axis_types=(kinds[0], *kinds)),
    )
