"""Query rows for kernels that read each row's own pages: tokens x heads that share a kv head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class QueryRows:
    """R rows of M queries; R is a multiple of the B sequences, whose parts are adjacent."""

    q: Any  # [R, K, M, H]
    last: Any  # int32 [R, M], last visible position of a query; -1 at padding
    low: Any  # int32 [R], first page-table column of the row
    high: Any  # int32 [R], last column, exclusive; low < high
    window: Any  # int32 [], number of visible keys
    own: Any = None  # int32 [R, M], position of a query if it is not `last`; -1 at padding


def split_rows(
    q: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    window: Int[Array, ""],
    *,
    n_kv_heads: int,
    page_len: int,
    max_queries: int,
    size: Callable[[int], int],
    ahead: Int[Array, "B T"] | None = None,
) -> QueryRows:
    """Splits queries into parts of t tokens, t dividing T, with at most `max_queries` per kv head.

    M is padded to `size(t * G)`. `ahead` are the last visible positions, else `positions`.
    """
    _, T, N, H = q.shape
    K, G = n_kv_heads, N // n_kv_heads
    t = next(t for t in range(T, 0, -1) if T % t == 0 and (t * G <= max_queries or t == 1))
    rows = q.reshape(-1, t, K, G, H).transpose(0, 2, 1, 3, 4).reshape(-1, K, t * G, H)
    own = positions.reshape(-1, t)
    last = own if ahead is None else ahead.reshape(-1, t)
    far = jnp.iinfo(jnp.int32).max
    window = jnp.where(window > 0, window, far)
    first = jnp.where(own >= 0, jnp.maximum(own - window + 1, 0), far)
    high = jnp.maximum(jnp.max(last, axis=1) // page_len + 1, 1)
    low = jnp.minimum(jnp.min(first, axis=1) // page_len, high - 1)
    missing = size(t * G) - t * G
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, missing), (0, 0)))

    def of_queries(a: jax.Array) -> jax.Array:
        return jnp.pad(jnp.repeat(a, G, axis=1), ((0, 0), (0, missing)), constant_values=-1)

    return QueryRows(
        q=rows,
        last=of_queries(last),
        low=low,
        high=high,
        window=window,
        own=None if ahead is None else of_queries(own),
    )


def join_rows(
    out: Float[Array, "R K M H"], shape: tuple[int, int, int, int]
) -> Float[Array, "B T N H"]:
    """The inverse of `split_rows` for the results of queries of this shape."""
    B, T, N, H = shape
    R, K = out.shape[:2]
    t, G = B * T // R, N // K
    out = out[:, :, : t * G].reshape(R, K, t, G, H)
    return jax.lax.transpose(out, (0, 2, 1, 3, 4)).reshape(shape)
