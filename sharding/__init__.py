"""Device meshes, the rules that map logical array axes to mesh axes, and resharding of trees."""

from sharding.collectives import gather_matrix, gather_residual, scatter_residual
from sharding.mesh import (
    MESH_AXES,
    abstract_mesh,
    first_devices,
    make_mesh,
    needs_trial_run,
    target_device_kind,
    target_platform,
)
from sharding.order import mesh_order, put_batch, row_order, unshuffle, zigzag
from sharding.resharding import Resharding, process_mesh_sizes, reshape_mesh
from sharding.rules import (
    DECODE,
    PIPELINE,
    PRESETS,
    REPLICAS,
    RING,
    TENSOR,
    TRAIN,
    ULYSSES,
    Rules,
)
from sharding.transfer import Transfer, make_transfer
from sharding.tree import (
    bytes_per_device,
    check_host_memory,
    copy_tree,
    host_bytes_per_device,
    is_on_host,
    on_mesh,
    restore_memory_space,
    to_device,
    to_host,
)

__all__ = [
    "DECODE",
    "MESH_AXES",
    "PIPELINE",
    "PRESETS",
    "REPLICAS",
    "RING",
    "TENSOR",
    "TRAIN",
    "ULYSSES",
    "Resharding",
    "Rules",
    "Transfer",
    "abstract_mesh",
    "bytes_per_device",
    "check_host_memory",
    "copy_tree",
    "first_devices",
    "gather_matrix",
    "gather_residual",
    "host_bytes_per_device",
    "is_on_host",
    "make_mesh",
    "make_transfer",
    "mesh_order",
    "needs_trial_run",
    "on_mesh",
    "process_mesh_sizes",
    "put_batch",
    "reshape_mesh",
    "restore_memory_space",
    "row_order",
    "scatter_residual",
    "target_device_kind",
    "target_platform",
    "to_device",
    "to_host",
    "unshuffle",
    "zigzag",
]
