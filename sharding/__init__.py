"""Named mesh axes, and the rules that map logical array axes onto them."""

from sharding.mesh import MESH_AXES, abstract_mesh, make_mesh
from sharding.rules import DECODE, PRESETS, TRAIN, Rules
from sharding.tree import bytes_per_device, put_batch, reshard_tree, shardings

__all__ = [
    "DECODE",
    "MESH_AXES",
    "PRESETS",
    "TRAIN",
    "Rules",
    "abstract_mesh",
    "bytes_per_device",
    "make_mesh",
    "put_batch",
    "reshard_tree",
    "shardings",
]
