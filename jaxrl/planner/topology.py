"""Named machines: memory and peak rates of a chip, and device descriptions to compile for.

Peak rates are the vendors' (cloud.google.com/tpu/docs/system-architecture-tpu-vm, nvidia.com H100
and H200 data sheets, dense). TPU link rates are those of a ring over one torus axis in both
directions; TPU hosts are connected by PCIe (jax-ml.github.io/scaling-book, "TPUs"). The memory of a
TPU is what its compiler grants a program ("exceeds available HBM"). A CPU device stands for one
AVX-512 core, measured with 2048 x 2048 matrix products and a stream read.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

GIB = 2**30
L2_BYTES = 50.0 * 2**20  # of H100 and H200
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


@dataclasses.dataclass(frozen=True)
class Chip:
    """Memory and peak rates of one device."""

    name: str
    memory_bytes: float
    flops_per_s: dict[str, float]  # of matrix products, by operand dtype
    memory_bytes_per_s: float
    link_bytes_per_s: float  # within a node or a TPU slice
    network_bytes_per_s: float  # between nodes, per device
    host_bytes_per_s: float  # between a device and its host, one way
    node: int  # devices per node; 0 = all
    l2_bytes: float = 0.0  # cache between HBM and the cores; 0 = none, or unknown

    def rate(self, dtype: str) -> float:
        return self.flops_per_s.get(dtype, self.flops_per_s["f32"])


def _tpu(name: str, gib: float, tera: float, giga: float, link: float, host: float) -> Chip:
    # Float32 products run as one bfloat16 pass at JAX's default precision on TPU.
    flops = {"bf16": tera * 1e12, "f32": tera * 1e12}
    return Chip(name, gib * GIB, flops, giga * 1e9, link * 1e9, link * 1e9, host * 1e9, 0)


def _gpu(name: str, gib: float, giga: float) -> Chip:
    flops = {"bf16": 989e12, "f16": 989e12, "f32": 494e12}  # float32 products as TF32
    return Chip(name, gib * GIB, flops, giga * 1e9, 450e9, 50e9, 64e9, 8, L2_BYTES)


CHIPS = {
    "v5e": _tpu("TPU v5e", 15.75, 197.0, 819.0, 90.0, 16.0),
    "v5p": _tpu("TPU v5p", 95.73, 459.0, 2765.0, 180.0, 16.0),
    "v6e": _tpu("TPU v6e", 31.24, 918.0, 1640.0, 180.0, 32.0),
    "h100": _gpu("H100 SXM", 79.6, 3350.0),
    "h200": _gpu("H200 SXM", 139.8, 4800.0),
    "cpu": Chip("CPU core", 0.0, {"f32": 140e9, "bf16": 700e9}, 14e9, 10e9, 10e9, 14e9, 0),
}
# Part of JAX's `device_kind` -> chip.
DEVICE_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "H100": "h100",
    "H200": "h200",
}
KNOWN = "v5e:2x4, v5p:4x4x4, v6e:16x16 (any shape that the chip supports), h100:64, h200:8, cpu:8"

# The compiler chooses between Triton's and cuBLASLt's matrix products by timing both. Without a
# device it takes Triton's, which it compiles without tuning.
CUBLASLT = {"xla_gpu_enable_triton_gemm": False}

# The compiler's description of a GPU
# (openxla/xla, xla/stream_executor/device_description.proto).
GPU_DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
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


def topology(name: str) -> Topology:
    """The machine with a name such as "v5p:4x4x4", "h200:64" or "cpu:8".

    Raises ValueError for an unknown name, a shape that the chip does not support, or a compiler
    that is not installed.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+)*", shape):
        raise ValueError(f"unknown topology {name!r}; set one of {KNOWN}")
    n = math.prod(int(size) for size in shape.split("x"))
    if kind == "cpu":
        return _cpu(name, n)
    if kind.startswith("v"):
        return Topology(name, "tpu", CHIPS[kind], _tpu_devices(name))
    devices = _gpu_devices(kind, n)
    return Topology(name, "gpu", CHIPS[kind], devices, CUBLASLT, "matrix products of cuBLASLt")


def chip_of(device_kind: str) -> Chip | None:
    """The chip of an attached device; None if its peak rates are unknown."""
    named = (chip for part, chip in DEVICE_KINDS.items() if part in device_kind)
    return CHIPS[found] if (found := next(named, None)) else None


def simulated_cpus(name: str) -> int:
    """Number of CPU devices of a topology "cpu:N"; 0 for other topologies."""
    match = re.fullmatch(r"cpu:(\d+(?:x\d+)*)", name)
    return math.prod(int(size) for size in match[1].split("x")) if match else 0


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
            f"{name} needs the TPU compiler, which is not installed; uv pip install libtpu, or the "
            "extra jaxrl[tpu] (no TPU is needed)"
        )
    for variable, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:  # the plugin raises its own types
        raise ValueError(
            f"the TPU compiler rejected {name}: {str(error).splitlines()[0]}; examples: {KNOWN}"
        ) from error


def _gpu_devices(kind: str, n: int) -> Sequence[Any]:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ValueError(
            f"{kind}:{n} needs the CUDA compiler, which is not installed; uv pip install "
            "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm, or the extra "
            "jaxrl[cuda] (no GPU is needed)"
        )
    chip = CHIPS[kind]
    node = min(n, chip.node)
    if n % node:
        raise ValueError(
            f"{kind}:{n} is not a whole number of nodes of {node} GPUs; set a multiple of {node}"
        )
    target = GPU_DESCRIPTION.format(
        bandwidth=int(chip.memory_bytes_per_s),
        memory=int(chip.memory_bytes),
        l2=int(L2_BYTES),
        name=chip.name,
    )
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        topology=f"1x{n // node}x{node}",
        target_config=target,
    ).devices
