"""The start of a program, before the imports that take seconds. Imports nothing heavy itself."""

import gc
import importlib.util
import os
from pathlib import Path

import jaxrl
from jaxrl.ending import end_on_signals


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

    Almost all objects that imports and tracing allocate are kept, and every full collection visits
    all of them: it would take 3 of 18 s of the start of a run with a full compilation cache.
    """
    begin_program()
    print("jaxrl: loading", flush=True)
    _use_cpu_without_accelerator()
    gc.disable()


def prepare_libraries() -> None:
    """As `begin_loading` for the libraries that another program, such as a notebook, imports next:
    no advice of transformers, and no search for accelerators that are not here.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    _use_cpu_without_accelerator()


def _use_cpu_without_accelerator() -> None:
    """Sets JAX_PLATFORMS=cpu, with a line, if only packages for accelerators are here."""
    if "JAX_PLATFORMS" not in os.environ and _has_plugin() and not _has_accelerator():
        os.environ["JAX_PLATFORMS"] = "cpu"  # otherwise libtpu and CUDA print errors
        print("jaxrl: no TPU or NVIDIA GPU on this machine; JAX_PLATFORMS=cpu", flush=True)


def end_loading() -> None:
    """Resumes garbage collection."""
    gc.enable()


def _has_plugin() -> bool:
    """Whether a package is installed that looks for an accelerator, as the planner needs them."""
    names = ("libtpu", "jax_cuda13_plugin", "jax_cuda12_plugin")
    return any(importlib.util.find_spec(name) is not None for name in names)


def _has_accelerator(root: Path = Path("/")) -> bool:
    """Whether the machine has a TPU or an NVIDIA GPU, as a PCI device or as a device file."""
    vendors = {"0x10de", "0x1ae0"}  # NVIDIA, Google
    files = ("dev/nvidia[0-9]*", "dev/accel*", "dev/vfio/[0-9]*", "dev/dxg")
    return any(
        path.read_text().strip() in vendors for path in root.glob("sys/bus/pci/devices/*/vendor")
    ) or any(found for pattern in files for found in root.glob(pattern))
