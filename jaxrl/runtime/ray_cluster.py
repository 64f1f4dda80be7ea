"""The Ray cluster that a run uses: connecting to it, and what a process reserves on a host."""

import importlib
import os
import signal
import socket
from types import ModuleType

from jaxrl.config.packages import install_advice

FORWARDED_PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "NCCL_", "HF_", "WANDB_", "MLFLOW_", "PYTHONPATH")


def import_ray(user: str, alternative: str) -> ModuleType:
    """The package. Raises ValueError, which says what needs it and what does not."""
    # Ray would copy the folder of a program that `uv run` started, and install it on each host.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ValueError(
            f"{user} needs Ray, which cannot be imported ({error}); install it on all hosts "
            f"with {install_advice('ray')}; or {alternative}"
        ) from error


def connect(ray: ModuleType, address: str | None = None) -> None:
    """Joins the cluster at `address`, RAY_ADDRESS or on this host; else starts one on this host.

    The process keeps its signal handlers. Raises ConnectionError if there is no cluster at the
    address.
    """
    if ray.is_initialized():
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init(address=address, log_to_driver=False, configure_logging=False, include_dashboard=False)
    for number, handler in kept.items():  # Ray's handlers would end the process without a save
        signal.signal(number, handler)


def actor_options(bundle: dict[str, int]) -> dict[str, object]:
    """The options of a Ray actor that reserves these resources."""
    return {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "resources": {"TPU": bundle["TPU"]} if "TPU" in bundle else {},
    }


def free_address(host: str) -> str:
    """A host:port of this machine, whose IP address is `host`, that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"


def forwarded_environment() -> dict[str, str]:
    """Environment variables of this process that the processes on all hosts get."""
    return {name: v for name, v in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}
