"""The device mesh, and the platform that programs are compiled for.

All six axes are always present; an unused axis has size 1. The platform is read from the mesh, not
from this machine.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType

# Slowest-varying first: replicas may be on different slices; tensor shards need the fastest links.
MESH_AXES = ("stage", "replica", "fsdp", "expert", "sequence", "tensor")
ONE_TOKEN_AXES = ("stage", "sequence", "tensor")  # their devices compute a decode token together


def axis_sizes(n_devices: int, **sizes: int) -> dict[str, int]:
    """Sizes of all six axes; at most one given size may be -1, which takes the remaining devices.

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
            f"the mesh ({shown}) needs {math.prod(full.values())} devices but there are "
            f"{n_devices}; set one of the config.mesh sizes to -1 to take the remaining devices"
        )
    return full


def make_mesh(devices: Sequence[Any] | None = None, **sizes: int) -> jax.sharding.Mesh:
    """An explicit-mode mesh over `devices` (default: all); axes left out have size 1.

    `make_mesh()` is one device, `make_mesh(fsdp=-1)` is all of them.
    """
    if devices is None:
        devices = first_devices(jax.devices(), **sizes)
    full = axis_sizes(len(devices), **sizes)
    kinds = (AxisType.Explicit,) * len(MESH_AXES)
    return jax.sharding.Mesh(_order(devices, full), MESH_AXES, axis_types=kinds)


def first_devices(devices: Sequence[Any], **sizes: int) -> Sequence[Any]:
    """The first devices, as many as a mesh of these sizes has; all of them if one size is -1."""
    return devices if -1 in sizes.values() else devices[: math.prod(sizes.values())]


def _order(devices: Sequence[Any], sizes: dict[str, int]) -> np.ndarray:
    """The devices as an array in which the faster axes have the closer devices.

    Unlike jax.make_mesh, this allows 8 x 8 on a torus of 4 x 4 x 4, and several slices. The network
    between slices is slower, so `replica` or `stage` spans them.
    """
    tpu = devices[0].platform == "tpu"
    n_slices = len({getattr(device, "slice_index", 0) for device in devices}) if tpu else 1
    slow = [axis for axis in ("replica", "stage") if sizes[axis] % n_slices == 0]
    if not slow:
        raise ValueError(
            f"{len(devices)} devices are in {n_slices} slices, and neither "
            f"mesh.replica={sizes['replica']} nor mesh.stage={sizes['stage']} is a multiple of "
            f"{n_slices}; set config.mesh.replica={n_slices}, or a multiple"
        )
    between = {axis: n_slices if axis == slow[0] else 1 for axis in MESH_AXES}
    inside = [sizes[axis] // between[axis] for axis in MESH_AXES]
    if n_slices == 1:
        make = functools.partial(mesh_utils.create_device_mesh, inside, devices)
        try:  # make each host's chips a block of the mesh, if possible
            return make(contiguous_submeshes=True, allow_split_physical_axes=True)
        except ValueError:
            return make(allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(
        inside, list(between.values()), devices, allow_split_physical_axes=True
    )


def abstract_mesh(n_devices: int, **sizes: int) -> AbstractMesh:
    """The mesh of `make_mesh` without devices, to check shapes and shardings on any machine."""
    full = axis_sizes(n_devices, **sizes)
    kinds = (AxisType.Explicit,) * len(MESH_AXES)
    return AbstractMesh(tuple(full.values()), MESH_AXES, axis_types=kinds)


def target_platform() -> str:
    """ "cpu", "gpu" or "tpu": the platform of the current mesh, or of the default backend.

    Implementations are chosen by this platform, so a program that is compiled here for devices
    elsewhere gets the implementation that is best there.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def target_device_kind() -> str:
    """JAX's name ("TPU v5 lite") of the chip of the current mesh, or of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def target_cores() -> int:
    """Cores of a device of the current mesh that share its memory: 2 on TPU v4 and v5p."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.num_cores if device is not None else None) or 1


def needs_trial_run() -> bool:
    """Whether a compiled program should run once on padding before its first use.

    On accelerators this loads the program and shows before the first rollout that its memory does
    not suffice. On CPU neither is needed, and the run takes seconds.
    """
    return target_platform() != "cpu"
