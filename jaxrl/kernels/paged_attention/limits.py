"""Limits of the Pallas kernels for paged KV caches, known without an import of Pallas."""

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention.limits import MAX_WIDTH, MIN_ROWS
from jaxrl.kernels.choice import is_since_hopper
from jaxrl.kernels.paged_attention.pages import Pages
from jaxrl.kernels.quantized import Quantized
from sharding import target_device_kind

TABLE_BYTES = 7 * 2**17  # page tables of a call of the ragged kernel, in 1 MiB of scalar memory
SUBLANES, LANES = 16, 128  # of a bfloat16 tile on TPU
MAX_WIDTH_HOPPER = 640  # of heads, in the shared memory of a GPU since Hopper


def unsupported_by_ragged(k_pages: Pages, page_table: jax.Array) -> str | None:
    """The property of these pages that the kernel does not support; None if it does."""
    if k_pages.dtype not in (jnp.bfloat16, jnp.float32):
        return f"pages of {k_pages.dtype} (set config.rollout.kv_dtype to 'auto')"
    if k_pages.shape[2] % SUBLANES:
        return (
            f"pages of {k_pages.shape[2]} tokens (set config.rollout.page_len to a multiple of "
            f"{SUBLANES})"
        )
    if k_pages.shape[3] % LANES:  # the compiler uses another layout, and would copy the pool
        return f"heads of width {k_pages.shape[3]}, no multiple of {LANES}"
    if page_table.size * 4 > TABLE_BYTES:
        rows, columns = page_table.shape
        return (
            f"page tables of {rows} rows x {columns} pages (set config.rollout.page_len to "
            "a multiple of it, or lower config.rollout.max_num_seqs)"
        )
    return None


def unsupported_by_triton(k_pages: Pages) -> str | None:
    """The property of these pages that the kernel does not support; None if it does."""
    page_len, H = k_pages.shape[2:]
    if not isinstance(k_pages, Quantized) and k_pages.dtype not in (jnp.bfloat16, jnp.float32):
        return f"pages of {k_pages.dtype} (set config.rollout.kv_dtype to 'auto')"
    if page_len % MIN_ROWS or page_len & (page_len - 1):
        return f"pages of {page_len} tokens (set config.rollout.page_len to 16, 32, 64, ...)"
    if H % MIN_ROWS:
        return f"heads of width {H}, no multiple of {MIN_ROWS}"
    limit = MAX_WIDTH_HOPPER if is_since_hopper(target_device_kind()) else MAX_WIDTH
    if limit < H:
        return f"heads of width {H}, more than {limit}"
    return None


def feature_parts(H: int) -> list[tuple[int, int]]:
    """(start, size) of parts of a multiple of 16 features; the sizes are powers of two."""
    sizes = [1 << bit for bit in reversed(range(H.bit_length())) if H >> bit & 1]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
