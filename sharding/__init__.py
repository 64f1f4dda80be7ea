"""Named mesh axes, and the rules that map logical array axes onto them."""

from sharding.mesh import MESH_AXES, abstract_mesh, make_mesh
from sharding.order import mesh_order, row_order, unshuffle, zigzag
from sharding.rules import DECODE, PIPELINE, PRESETS, RING, TRAIN, ULYSSES, Rules
from sharding.tree import bytes_per_device, put_batch, reshard_tree, shardings

__all__ = [
    "DECODE",
    "MESH_AXES",
    "PIPELINE",
    "PRESETS",
    "RING",
    "TRAIN",
    "ULYSSES",
    "Rules",
    "abstract_mesh",
    "bytes_per_device",
    "make_mesh",
    "mesh_order",
    "put_batch",
    "reshard_tree",
    "row_order",
    "shardings",
    "unshuffle",
    "zigzag",
]
