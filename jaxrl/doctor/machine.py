"""Facts about this machine: versions, devices, disks, the model hub, environment variables."""

import importlib.metadata
import os
import platform
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from jaxrl.config.disk import ADVICE
from jaxrl.config.packages import install_advice
from jaxrl.doctor.finding import Finding, checked
from jaxrl.runtime.compilation import DEFAULT_CACHE, cache_problem, n_cores, nearest_existing
from jaxrl.runtime.device_memory import jax_share, share_variable
from jaxrl.runtime.host_memory import physical_memory
from jaxrl.runtime.start import has_gpu, installed_plugins
from jaxrl.runtime.versions import PACKAGES, commit

GIB = 2**30
MIN_RUN_BYTES = GIB  # for a run's metrics and logs; checkpoints need more
HUB_TIMEOUT_S = 5.0
PLUGIN_PACKAGES = (
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)
DRIVER = Path("/proc/driver/nvidia/version")
PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "NCCL_", "CUDA_", "NVIDIA_", "SLURM_STEP_NUM_")
VARIABLES = (
    "CC",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "TF_CPP_MIN_LOG_LEVEL",
    "TMPDIR",
    "XDG_CACHE_HOME",
)
SECRET_NAMES = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")


def version_findings() -> Iterator[Finding]:
    """jaxrl, Python, the system, and the packages that compute."""
    source = commit()
    yield _version("jaxrl", f", commit {source}" if source else "")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield Finding("versions", "Python", f"{platform.python_version()} on {system}")
    yield Finding(
        "versions", "host", f"{n_cores()} cores, {physical_memory() / GIB:.0f} GiB of memory"
    )
    for name in PACKAGES:
        yield _version(name)
    yield from (found for name in PLUGIN_PACKAGES if (found := _version(name)).text != "absent")
    if DRIVER.is_file():
        yield Finding("versions", "NVIDIA driver", DRIVER.read_text().splitlines()[0])


def _version(name: str, more: str = "") -> Finding:
    try:
        text = importlib.metadata.version(name) + more
    except importlib.metadata.PackageNotFoundError:
        text = "absent"
    return Finding("versions", name, text)


def device_findings(backend: str) -> Iterator[Finding]:
    """The opened devices of JAX and their memory."""
    devices = jax.local_devices()
    text = f"{len(devices)} x {devices[0].device_kind} ({backend})"
    if jax.process_count() > 1:
        text += f", {jax.device_count()} in {jax.process_count()} processes"
    yield Finding("devices", "JAX", text, "ok")
    stats = [stats for device in devices if (stats := device.memory_stats())]
    limits = [one["bytes_limit"] for one in stats if "bytes_limit" in one]
    if limits:
        used = max(one.get("bytes_in_use", 0) for one in stats)
        text = f"{min(limits) / GIB:.1f} GiB for JAX per device, {used / GIB:.1f} GiB in use"
        yield Finding("devices", "memory", text)
    if backend == "gpu":
        name = share_variable()
        share = f"{name}={os.environ[name]}" if name else f"{jax_share():g}"
        yield Finding("devices", "share", f"JAX takes this part of the memory: {share}")
    yield from _unused_accelerator(backend)


def _unused_accelerator(backend: str) -> Iterator[Finding]:
    """A warning if an accelerator or its plugin is there without the other one."""
    plugins = installed_plugins()
    if backend != "cpu":
        return
    if has_gpu() and "cuda" not in plugins:
        text = f"there is an NVIDIA GPU without JAX's plugin; {install_advice('cuda')}"
        yield Finding("devices", "GPU", text, "warning")
    elif plugins:
        text = (
            f"the plugin for {' and '.join(plugins)} is installed, but JAX runs on the CPU: there "
            f"is no such device, or JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} selects it"
        )
        yield Finding("devices", "plugin", text, "warning")


def disk_findings(run_dir: Path) -> Iterator[Finding]:
    """The disks of the compilation cache, of runs and of models."""
    cache = Path(DEFAULT_CACHE).expanduser()
    problem = cache_problem(cache)
    yield checked("disks", "compilation cache", problem, _free(cache))
    free = shutil.disk_usage(nearest_existing(run_dir)).free
    problem = ""
    if free < MIN_RUN_BYTES:
        problem = f"{_free(run_dir)}, less than a run writes; {ADVICE}"
    elif not os.access(nearest_existing(run_dir), os.W_OK):
        problem = f"{nearest_existing(run_dir).absolute()} is not writable; {ADVICE}"
    yield checked("disks", "run folder", problem, _free(run_dir))
    models = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    yield Finding("disks", "models of the hub", _free(Path(models).expanduser()))


def _free(folder: Path) -> str:
    free = shutil.disk_usage(nearest_existing(folder)).free
    return f"{folder.absolute()}: {free / GIB:.1f} GiB free"


def hub_finding() -> Finding:
    """Whether the model hub answers."""
    if os.environ.get("HF_HUB_OFFLINE"):
        return Finding("network", "model hub", "not tried: HF_HUB_OFFLINE is set")
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        with urllib.request.urlopen(address, timeout=HUB_TIMEOUT_S):
            pass
    except urllib.error.HTTPError:  # it answers
        pass
    except (OSError, ValueError) as error:
        text = (
            f"{address} does not answer ({error}); runs from model folders and data on this "
            "machine need no network. Set HF_ENDPOINT to a mirror, or https_proxy, for others"
        )
        return Finding("network", "model hub", text, "warning")
    return Finding("network", "model hub", f"{address} answers", "ok")


def variable_findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """The environment variables that change what JAX does, without any that may be secret."""
    for name in sorted(env):
        is_secret = any(word in name.upper() for word in SECRET_NAMES)
        if not is_secret and (name in VARIABLES or name.startswith(PREFIXES)):
            yield Finding("environment", name, env[name])
