"""Queries as rows: the tokens of a piece of a sequence and the heads that share a kv head, for kernels that take each
row's own pages."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class Rows:
    """R rows of M queries, R a multiple of the B sequences: the pieces of one lie side by side."""

    q: Any  # [R, K, M, H]
    last: Any  # int32 [R, M], the last position that a query sees; -1 at padding
    low: Any  # int32 [R], the columns of the page table that the row sees: low..high, at least one
    high: Any  # int32 [R], exclusive
    reach: Any  # int32 [], keys that a query sees


def split_rows(
    q: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    window: Int[Array, ""],
    *,
    n_kv_heads: int,
    page_len: int,
    most: int,
    size: Callable[[int], int],
) -> Rows:
    """Pieces of as many tokens as divide T and make at most `most` queries a kv head, padded to the
    `size` of so many."""
    _, T, N, H = q.shape
    K, G = n_kv_heads, N // n_kv_heads
    t = next(t for t in range(T, 0, -1) if T % t == 0 and (t * G <= most or t == 1))
    rows = q.reshape(-1, t, K, G, H).transpose(0, 2, 1, 3, 4).reshape(-1, K, t * G, H)
    last = positions.reshape(-1, t)
    far = jnp.iinfo(jnp.int32).max
    reach = jnp.where(window > 0, window, far)
    first = jnp.where(last >= 0, jnp.maximum(last - reach + 1, 0), far)
    high = jnp.maximum(jnp.max(last, axis=1) // page_len + 1, 1)
    low = jnp.minimum(jnp.min(first, axis=1) // page_len, high - 1)
    missing = size(t * G) - t * G
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, missing), (0, 0)))
    last = jnp.pad(jnp.repeat(last, G, axis=1), ((0, 0), (0, missing)), constant_values=-1)
    return Rows(q=rows, last=last, low=low, high=high, reach=reach)


def join_rows(
    out: Float[Array, "R K M H"], shape: tuple[int, int, int, int]
) -> Float[Array, "B T N H"]:
    """The results of `split_rows` of queries of this shape."""
    B, T, N, H = shape
    R, K = out.shape[:2]
    t, G = B * T // R, N // K
    out = out[:, :, : t * G].reshape(R, K, t, G, H)
    return jax.lax.transpose(out, (0, 2, 1, 3, 4)).reshape(shape)
