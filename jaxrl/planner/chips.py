"""Named chips: memory and peak rates.

Peak rates are the vendors' (cloud.google.com/tpu/docs, pages v4 to tpu7x; nvidia.com data sheets of
A100 SXM 80 GB, H100, H200 and DGX B200, dense). TPU link rates are those of a ring over one torus
axis in both directions; TPU hosts are connected by PCIe (jax-ml.github.io/scaling-book, "TPUs").
The memory of a TPU is what its compiler grants a program ("exceeds available HBM"). A CPU device
stands for one AVX-512 core, measured with 2048 x 2048 matrix products and a stream read.
The clock of a TPU is its peak rate divided by what its matrix units multiply in a cycle: 2 x 128 x
128 operations for each of 8 units (v4, v5p) or 4 (v5e), 2 x 256 x 256 for each of 4 (v6e).
"""

import dataclasses
import math
import re

from jaxrl.runtime.start import GPU_MEMORY_SHARE

GIB = 2**30


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
    clock_hz: float = 0.0  # of a TPU; 0 = unknown
    jax_share: float = 1.0  # part of the memory that JAX takes

    def usable_bytes(self, memory_utilization: float) -> float:
        """The memory that a run may use with this `rollout.memory_utilization`."""
        return min(memory_utilization, self.jax_share) * self.memory_bytes

    def rate(self, dtype: str) -> float:
        return self.flops_per_s.get(dtype, self.flops_per_s["f32"])


def _tpu(
    name: str, gib: float, tera: float, giga: float, link: float, host: float, ghz: float = 0.0
) -> Chip:
    # Float32 products run as one bfloat16 pass at JAX's default precision on TPU.
    flops = {"bf16": tera * 1e12, "f32": tera * 1e12}
    rates = (giga * 1e9, link * 1e9, link * 1e9, host * 1e9)
    return Chip(name, gib * GIB, flops, *rates, 0, clock_hz=ghz * 1e9)


@dataclasses.dataclass(frozen=True)
class Die:
    """The compiler's data of a GPU (openxla/xla, xla/backends/gpu/target_config/specs)."""

    capability: tuple[int, int]  # of CUDA: major, minor
    cores: int
    fpus: int  # per core
    clock_ghz: float
    shared_bytes: int  # per core
    block_shared_bytes: int  # per block, opt-in
    l2_bytes: int


AMPERE = Die((8, 0), 108, 64, 1.41, 167936, 166912, 40 * 2**20)
ADA = Die((8, 9), 128, 128, 2.52, 102400, 101376, 72 * 2**20)
HOPPER = Die((9, 0), 132, 128, 1.98, 233472, 232448, 50 * 2**20)
BLACKWELL = Die((10, 0), 148, 128, 1.965, 233472, 232448, 132644864)
DIES = {"a100": AMPERE, "rtx4090": ADA, "h100": HOPPER, "h200": HOPPER, "b200": BLACKWELL}


def _gpu(
    name: str,
    gib: float,
    tera: float,
    giga: float,
    link: float,
    network: float,
    host: float,
    die: Die,
) -> Chip:
    # Float32 products as TF32, at half the rate of bfloat16.
    flops = {"bf16": tera * 1e12, "f16": tera * 1e12, "f32": tera / 2 * 1e12}
    rates = (giga * 1e9, link * 1e9, network * 1e9, host * 1e9)
    share = GPU_MEMORY_SHARE
    return Chip(name, gib * GIB, flops, *rates, 8, float(die.l2_bytes), jax_share=share)


CHIPS = {
    "v4": _tpu("TPU v4", 30.75, 275.0, 1228.0, 90.0, 16.0, 1.05),
    "v5e": _tpu("TPU v5e", 15.75, 197.0, 819.0, 90.0, 16.0, 1.5),
    "v5p": _tpu("TPU v5p", 95.73, 459.0, 2765.0, 180.0, 16.0, 1.75),
    "v6e": _tpu("TPU v6e", 31.24, 918.0, 1640.0, 180.0, 32.0, 1.75),
    # A device is one of the two chiplets of a chip, with half of its rates.
    "v7x": _tpu("TPU v7x", 94.74, 1153.5, 3690.0, 100.0, 32.0),
    "a100": _gpu("A100 SXM", 79.2, 312.0, 2039.0, 300.0, 25.0, 32.0, AMPERE),
    "rtx4090": _gpu(
        "GeForce RTX 4090", 23.5, 165.0, 1008.0, 25.0, 12.5, 25.0, ADA
    ),  # PCIe 4.0 links
    "h100": _gpu("H100 SXM", 79.6, 989.0, 3350.0, 450.0, 50.0, 64.0, HOPPER),
    "h200": _gpu("H200 SXM", 139.8, 989.0, 4800.0, 450.0, 50.0, 64.0, HOPPER),
    "b200": _gpu("B200 SXM", 178.3, 2250.0, 8000.0, 900.0, 50.0, 64.0, BLACKWELL),
    "cpu": Chip("CPU core", 0.0, {"f32": 140e9, "bf16": 700e9}, 14e9, 10e9, 10e9, 14e9, 0),
}
# Part of JAX's `device_kind` -> chip.
DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "v7x",
    "A100": "a100",
    "RTX 4090": "rtx4090",
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
}
KNOWN = (
    "v4:2x2x4, v5e:2x4, v5p:4x4x4, v6e:16x16, v7x:2x2x2 (any shape that the chip supports), "
    "a100:8, rtx4090:1, h100:64, h200:8, b200:8, cpu:8"
)


def split_name(name: str) -> tuple[str, int]:
    """(name in CHIPS, number of devices) of a topology such as "v5p:4x4x4".

    Raises ValueError if it is unknown.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+)*", shape):
        raise ValueError(f"unknown topology {name!r}; set one of {KNOWN}")
    return kind, math.prod(int(size) for size in shape.split("x"))


def chip_of(device_kind: str) -> Chip | None:
    """The chip of an attached device; None if its peak rates are unknown."""
    named = (chip for part, chip in DEVICE_KINDS.items() if part in device_kind)
    return CHIPS[found] if (found := next(named, None)) else None
