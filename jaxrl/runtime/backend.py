"""Opening JAX's devices: an error of JAX or a driver becomes one message that says what to do."""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator

import jax

from jaxrl.config.packages import install_advice
from jaxrl.runtime.start import has_accelerator, has_gpu, installed_plugins

MAX_CHARS = 300  # of JAX's reason in a message
# Logged while JAX loads its plugins and opens their devices: it then continues on the CPU.
LOGGERS = ("jax_plugins", "jax._src.xla_bridge")
ADVICE = (
    r"\((set JAX_PLATFORMS|you may need to|Set TF_CPP)[^)]*\)"  # JAX's own, which ours replaces
)
NAMES = {"tpu": "the TPU", "cuda": "the NVIDIA GPU", "gpu": "the NVIDIA GPU"}
# What the text of JAX, libtpu or CUDA has -> what to do. The first one that is found counts.
REMEDIES = (
    (
        r"in use by process with pid (\d+)",
        "one process at a time can use a TPU: wait for that process, or end it with `kill {0}`",
    ),
    (
        r"already in use|resource busy",
        "another process uses the TPU: `sudo lsof -w /dev/accel* /dev/vfio/*` names it; wait for "
        "it, or end it. If there is none, remove /tmp/libtpu_lockfile",
    ),
    (
        r"Mismatched PJRT|PJRT API version|Unexpected PJRT_",
        "the versions of jaxlib and of the plugin (libtpu or CUDA) do not fit each other; install "
        "both together with {tpu} or {cuda}",
    ),
    (
        r"driver version is insufficient|InsufficientDriver|INSUFFICIENT_DRIVER|DRIVER_MISMATCH"
        r"|unsupported toolchain|UNSUPPORTED_PTX|COMPAT_NOT_SUPPORTED",
        "the NVIDIA driver is too old for the installed CUDA (`nvidia-smi` shows both); install "
        "driver 580 or newer for CUDA 13, or the plugin for CUDA 12 with `uv pip install "
        "'jax[cuda12]'`",
    ),
    (
        r"Outdated (\w+) installation",
        "{0} is older than jaxlib needs; install the packages of CUDA again with {cuda}, and unset "
        "LD_LIBRARY_PATH if it has other ones",
    ),
    (
        r"Unable to load (\w+)",
        "{0} cannot be loaded; install the packages of CUDA with {cuda}, and unset LD_LIBRARY_PATH "
        "if it has other ones",
    ),
    (
        r"SYSTEM_NOT_READY",
        "the fabric manager of the GPUs does not run; start it with `sudo systemctl start "
        "nvidia-fabricmanager`",
    ),
    (
        r"No visible GPU|no supported devices|ERROR_NO_DEVICE|no CUDA-capable device",
        "no GPU is visible; check `nvidia-smi`, CUDA_VISIBLE_DEVICES and the GPUs of the container",
    ),
    (
        r"no device for JAX_PLATFORMS",
        "there is no such device on this machine or in its container, or its plugin is not "
        "installed; install it with {tpu} or {cuda}",
    ),
    (
        r"Permission denied|Operation not permitted",
        "this user or container may not open the device; start the container with its devices "
        "(--privileged, or --gpus=all)",
    ),
    (
        r"not in the list of known backends|Unknown backend",
        "its plugin is not installed or did not load; install it with {tpu} or {cuda}",
    ),
    (
        r"Failed to open libtpu|libtpu.so: cannot open",
        "libtpu is not installed; install it with {tpu}",
    ),
)


class BackendError(ValueError):
    """The devices that JAX was to use cannot be opened."""


def open_backend() -> str:
    """Opens the devices. Returns the platform of the default ones: "cpu", "gpu" or "tpu".

    Raises BackendError with the remedy if JAX cannot open them, or if it uses the CPU of a machine
    whose accelerator has a known error. JAX_PLATFORMS=cpu selects the CPU.
    """
    with _logged_warnings() as logged:
        try:
            platform = jax.default_backend()
        except (RuntimeError, AssertionError) as error:  # an AssertionError: no GPU at all
            reason = str(error) or f"no device for JAX_PLATFORMS={jax.config.jax_platforms}"
            raise BackendError(explain(reason)) from error
    if platform != "cpu" or jax.config.jax_platforms:
        return platform
    is_there = {"tpu": has_accelerator(), "cuda": has_gpu()}
    missing = [name for name in installed_plugins() if is_there[name]]
    reason = " ".join([*map(unavailable, missing), *logged])
    if not missing:
        return platform
    if find_remedy(reason):
        raise BackendError(explain(reason))
    print(f"jaxrl: JAX runs on the CPU: {shortened(reason)}", file=sys.stderr, flush=True)
    return platform


def explain(reason: str) -> str:
    """The message for a text of JAX that says why it cannot open its devices."""
    found = re.search(r"(?:backend '?|JAX_PLATFORMS=)(tpu|cuda|gpu)", reason)
    device = NAMES[found[1]] if found else "its devices"
    remedy = find_remedy(reason) or "check the driver and the plugin, and the devices of JAX"
    return (
        f"JAX cannot use {device} ({shortened(reason)}): {remedy}. JAX_PLATFORMS=cpu runs on the "
        "CPU instead"
    )


def find_remedy(reason: str) -> str:
    """The remedy for an error of JAX; "" if it is not known."""
    for pattern, remedy in REMEDIES:
        if match := re.search(pattern, reason):
            advice = {extra: install_advice(extra) for extra in ("tpu", "cuda")}
            return remedy.format(*match.groups(), **advice)
    return ""


def shortened(reason: str) -> str:
    """The text on one line, without JAX's advice."""
    text = " ".join(re.sub(ADVICE, "", reason).split()).strip(" .")
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ..."


def unavailable(platform: str) -> str:
    """Why JAX has no devices of this platform; "" if it has some."""
    try:
        jax.devices(platform)
    except RuntimeError as error:
        return str(error)
    return ""


class _Lines(logging.Handler):
    """Keeps the text of each record."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def _logged_warnings() -> Iterator[list[str]]:
    """The warnings that JAX and its plugins log during the block."""
    handler, loggers = _Lines(), [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
