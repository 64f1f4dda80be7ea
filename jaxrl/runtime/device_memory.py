"""The memory of the attached devices, of which JAX takes a part on GPUs."""

import os
from collections.abc import Mapping

import jax

from jaxrl.runtime.start import MEMORY_VARIABLES

JAX_SHARE = 0.75  # of a GPU, if no variable sets it


def jax_share() -> float:
    """The part of a device's memory that JAX takes. Less than 1 on GPUs."""
    if jax.default_backend() != "gpu":
        return 1.0
    name = share_variable()
    return float(os.environ[name]) if name else JAX_SHARE


def share_variable() -> str:
    """The environment variable that sets JAX's part of a GPU's memory; "" if none does."""
    return next((name for name in MEMORY_VARIABLES if os.environ.get(name)), "")


def whole_bytes(stats: Mapping[str, int]) -> float:
    """The memory of a device from its `memory_stats`, including the part that JAX leaves."""
    return stats["bytes_limit"] / jax_share()


def usable_bytes(stats: Mapping[str, int], memory_utilization: float) -> float:
    """This part of a device's whole memory, at most what JAX takes of it."""
    return min(memory_utilization, jax_share()) * whole_bytes(stats)
