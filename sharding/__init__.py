"""Named mesh axes, and the rules that map logical array axes onto them."""

from sharding.mesh import MESH_AXES, abstract_mesh, make_mesh
from sharding.rules import PRESETS, Rules
from sharding.tree import bytes_per_device, reshard_tree, shardings

__all__ = [
    "MESH_AXES",
    "PRESETS",
    "Rules",
    "abstract_mesh",
    "bytes_per_device",
    "make_mesh",
    "reshard_tree",
    "shardings",
]
