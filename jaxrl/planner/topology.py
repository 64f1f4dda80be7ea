"""Named machines: device descriptions to compile for, of devices that need not be attached."""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jaxrl.planner.chips import CHIPS, DIES, KNOWN, Chip, split_name

# Environment for libtpu without a chip: no metadata server, concurrent processes, quiet logs.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # required, but has no effect
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
}


# The compiler chooses between Triton's and cuBLASLt's matrix products by timing both. Without a
# device it takes Triton's, which it compiles without tuning.
CUBLASLT = {"xla_gpu_enable_triton_gemm": False}

# The compiler's description of a GPU
# (openxla/xla, xla/stream_executor/device_description.proto).
GPU_DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {block_shared}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "NVIDIA {name}"
"""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for, attached or not."""

    name: str
    platform: str  # "cpu" | "gpu" | "tpu"
    chip: Chip
    devices: Sequence[Any]
    # Compiler options that stand for decisions which the compiler makes by measuring on a device.
    compiler_options: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    note: str = ""  # what these options assume

    @property
    def n_processes(self) -> int:
        """Processes of a run on these devices."""
        return len({device.process_index for device in self.devices})


def topology(name: str) -> Topology:
    """The machine with a name such as "v5p:4x4x4", "h200:64" or "cpu:8".

    Raises ValueError for an unknown name, a shape that the chip does not support, or a compiler
    that is not installed.
    """
    kind, n = split_name(name)
    if kind == "cpu":
        return _cpu(name, n)
    if kind.startswith("v"):
        return Topology(name, "tpu", CHIPS[kind], _tpu_devices(name))
    devices = _gpu_devices(kind, n)
    return Topology(name, "gpu", CHIPS[kind], devices, CUBLASLT, "matrix products of cuBLASLt")


def _cpu(name: str, n: int) -> Topology:
    devices = jax.devices("cpu")
    if len(devices) < n:
        raise ValueError(
            f"{name} needs {n} simulated devices and this process has {len(devices)}; "
            f"set jax_num_cpu_devices to {n} before JAX is used (python -m jaxrl.plan does)"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / n
    return Topology(
        name, "cpu", dataclasses.replace(CHIPS["cpu"], memory_bytes=memory), devices[:n]
    )


def _tpu_devices(name: str) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"{name} needs the TPU compiler, which is not installed; add it with "
            "`uv pip install libtpu` (no TPU is needed)"
        )
    for variable, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    # One device per chip of v4, as a run has by default; later chips have no choice.
    options = {"chip_config_name": "megacore"} if name.startswith("v4:") else {}
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=name.replace("v7x:", "tpu7x:"), **options
        ).devices
    except Exception as error:  # the plugin raises its own types
        raise ValueError(
            f"the TPU compiler rejected {name}: {str(error).splitlines()[0]}; examples: {KNOWN}"
        ) from error


def _gpu_devices(kind: str, n: int) -> Sequence[Any]:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ValueError(
            f"{kind}:{n} needs the CUDA compiler, which is not installed; add it with `uv "
            f"pip install jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__} "
            "nvidia-cuda-nvcc nvidia-nvvm` (no GPU is needed)"
        )
    chip = CHIPS[kind]
    node = min(n, chip.node)
    if n % node:
        raise ValueError(
            f"{kind}:{n} is not a whole number of nodes of {node} GPUs; set a multiple of {node}"
        )
    die = DIES[kind]
    target = GPU_DESCRIPTION.format(
        bandwidth=int(chip.memory_bytes_per_s),
        memory=int(chip.memory_bytes),
        name=chip.name,
        major=die.capability[0],
        minor=die.capability[1],
        cores=die.cores,
        fpus=die.fpus,
        clock=die.clock_ghz,
        shared=die.shared_bytes,
        block_shared=die.block_shared_bytes,
        l2=die.l2_bytes,
    )
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        topology=f"1x{n // node}x{node}",
        target_config=target,
    ).devices
