"""The start of a program, before the imports that take seconds. Imports nothing heavy itself."""

import gc
import importlib.util
import math
import os
from pathlib import Path

import jaxrl
from jaxrl.ending import end_on_signals

GPU_MEMORY_SHARE = 0.92  # the rest is for CUDA, NCCL and the libraries' own buffers
NVIDIA, GOOGLE = "0x10de", "0x1ae0"  # PCI vendors
PLUGINS = {"tpu": ("libtpu",), "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def begin_program() -> None:
    """From now on SIGINT and SIGTERM end the program (`end_on_signals`).

    Exits with a message if Python finds another module as `sharding`: it searches the working
    directory first.
    """
    end_on_signals()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    found, ours = importlib.util.find_spec("sharding"), Path(jaxrl.__path__[0]).parent / "sharding"
    file = Path(found.origin) if found and found.origin else ours
    other = file.parent if file.name == "__init__.py" else file
    if not other.samefile(ours):
        raise SystemExit(
            f"error: {other} hides jaxrl's package sharding, because Python searches its folder "
            "first; rename it, or start the program in another folder"
        )


def begin_loading() -> None:
    """`begin_program` with a line that it loads; pauses garbage collection until `end_loading`.

    Sets the share of a GPU's memory that JAX takes (`set_gpu_memory`). Almost all objects that
    imports and tracing allocate are kept, and every full collection visits all of them: it would
    take 3 of 18 s of the start of a run with a full compilation cache.
    """
    begin_program()
    print("jaxrl: loading", flush=True)
    if "JAX_PLATFORMS" not in os.environ and installed_plugins() and not has_accelerator():
        os.environ["JAX_PLATFORMS"] = "cpu"  # otherwise libtpu and CUDA print errors
        print("jaxrl: no TPU or NVIDIA GPU on this machine; JAX_PLATFORMS=cpu", flush=True)
    if has_gpu():
        set_gpu_memory()
    gc.disable()


def set_gpu_memory() -> None:
    """Lets JAX take 92 % of the memory of each GPU, in place of its default of 75 %.

    A share that the user has set stays. A lower one is printed, since it leaves less room than the
    device has. Exits with a message if it is no positive number or set twice.
    """
    found = [(name, os.environ[name]) for name in MEMORY_VARIABLES if os.environ.get(name)]
    if not found:
        os.environ[MEMORY_VARIABLES[0]] = str(GPU_MEMORY_SHARE)
        return
    if len(found) > 1:
        raise SystemExit(
            f"error: {' and '.join(MEMORY_VARIABLES)} are both set, and JAX takes one; unset "
            f"{MEMORY_VARIABLES[1]}"
        )
    [(name, text)] = found
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise SystemExit(
            f"error: {name}={text} is not a share of a GPU's memory; set a number such as "
            f"{GPU_MEMORY_SHARE}, or unset it"
        )
    if share < GPU_MEMORY_SHARE:
        print(
            f"jaxrl: {name}={text}: JAX takes {share:.0%} of the memory of each GPU; unset it for "
            f"{GPU_MEMORY_SHARE:.0%}",
            flush=True,
        )


def end_loading() -> None:
    """Resumes garbage collection."""
    gc.enable()


def installed_plugins() -> list[str]:
    """The platforms whose plugin is installed, perhaps only for the planner: "tpu", "cuda"."""
    return [
        platform
        for platform, packages in PLUGINS.items()
        if any(importlib.util.find_spec(name) is not None for name in packages)
    ]


def has_accelerator(root: Path = Path("/")) -> bool:
    """Whether the machine has a TPU or an NVIDIA GPU, as a PCI device or as a device file."""
    return has_gpu(root) or _has_device(root, GOOGLE, ("accel*", "vfio/[0-9]*"))


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether the machine has an NVIDIA GPU, also below WSL."""
    return _has_device(root, NVIDIA, ("nvidia[0-9]*", "dxg"))


def _has_device(root: Path, vendor: str, files: tuple[str, ...]) -> bool:
    """Whether a PCI device has this vendor, or a file in /dev one of these patterns."""
    return any(
        path.read_text().strip() == vendor for path in root.glob("sys/bus/pci/devices/*/vendor")
    ) or any(found for pattern in files for found in (root / "dev").glob(pattern))
