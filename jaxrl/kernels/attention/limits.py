"""Limits of the kernels for packed rows: what `attention` knows without an import of Pallas."""

import jax
import jax.numpy as jnp

from jaxrl.kernels.choice import is_since_hopper
from sharding import target_device_kind

BLOCK, OWN_BLOCK = 64, 128  # tokens of a block of Triton's kernels: see `own_block`
POSITION_BITS = 16  # per position, so that splash packs two into an int32
MAX_LEN = 2**POSITION_BITS  # tokens of a row for splash
MIN_ROWS = 16  # of a tensor-core matrix product
MAX_WIDTH = 256  # of heads: cuDNN has no wider ones, and their blocks exceed a GPU's shared memory


def unsupported_by_triton(q: jax.Array) -> str | None:
    """The property of these queries that the kernels do not support; None if they do."""
    H = q.shape[-1]
    if H < MIN_ROWS or H & (H - 1):
        return f"heads of width {H}, no power of two"
    if H > MAX_WIDTH:
        return f"heads of width {H}, more than {MAX_WIDTH}"
    return None


def unsupported_by_cudnn(
    q: jax.Array, window: int | jax.Array, softcap: float | None, *, sinks: bool = False
) -> str | None:
    """The property of these queries that cuDNN does not support and the remedy; None if it does."""
    H = q.shape[-1]
    if q.dtype != jnp.bfloat16:
        return f"queries of {q.dtype} (set config.model.dtype to 'bfloat16')"
    if H > MAX_WIDTH or H % 8:
        return f"heads of width {H}, no multiple of 8 up to {MAX_WIDTH}"
    if softcap is not None:
        return f"soft caps ({softcap:g})"
    if sinks:
        return "attention sinks"
    if not isinstance(window, int):
        return "windows that differ between stacked layers (set config.model.layers to 'list')"
    return None


def unsupported_gpu() -> str | None:
    """The GPU of the current mesh if it is not known to have cuDNN's packed layout."""
    kind = target_device_kind()
    return None if is_since_hopper(kind) else kind


def own_block(q: jax.Array, n_tokens: int) -> int:
    """Tokens of the block that a program of Triton's kernels has for itself.

    It visits the others in blocks of BLOCK. With OWN_BLOCK tokens it reads them from the L2 cache
    half as often; this takes the shared memory of a GPU since Hopper, for bfloat16 and heads of at
    most 128.
    """
    fits = q.shape[-1] <= 128 and q.dtype.itemsize == 2 and not n_tokens % OWN_BLOCK
    return OWN_BLOCK if fits and is_since_hopper(target_device_kind()) else BLOCK
