"""Splash attention, JAX's Pallas kernel for TPU, on packed rows.

The keys visible to a query are one range, from the first that segment and window allow to its own
position. Both ends are packed into one int32 per query. Key blocks without a visible key are
neither read nor computed. Sliding windows may be traced; query heads share their kv head without
repeating it. Scores, softmax and sums are float32; matrix products use the operands' dtype.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.blocks import pad_axis
from jaxrl.kernels.attention_spec import SAVED_NAME, AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.shard_attention import shard_attention
from jaxrl.kernels.visibility import Visibility, check_separate, padded_range

BLOCKS = (512, 256, 128)  # tokens per query block and key block: the largest that divides the row
BITS = 16  # per position, so that two fit an int32
MAX_LEN = 2**BITS


def attention_splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v on each device's rows and heads.

    `interpret` emulates the kernel with XLA on any backend. Raises NotImplementedError without a
    TPU, for rows of more than 65,536 tokens and for shared prefixes.
    """
    if not interpret:
        check_platform("config.model.attention", "splash", "tpu")
    check_row_len(q.shape[1])
    check_separate("splash", visibility)
    attend = functools.partial(_local_attention, spec, interpret)
    return shard_attention(
        attend, q, k, v, segments=segments, window=window, visibility=None, rules=spec.rules
    )


def check_row_len(n_tokens: int) -> None:
    """Raises NotImplementedError if a device's rows are too long for two positions in an int32."""
    if n_tokens > MAX_LEN:
        raise NotImplementedError(
            f"config.model.attention='splash' supports rows of up to {MAX_LEN} tokens, this one "
            f"has {n_tokens}; set it to 'auto' or 'blockwise', or lower config.learner.buckets"
        )


def _local_attention(spec: AttentionSpec, interpret: bool, q, k, v, segments, window, _):
    T = q.shape[1]
    first, last = padded_range(segments, window, BLOCKS[-1])
    q = (q.astype(jnp.float32) * spec.scale).astype(q.dtype)
    rows = (pad_axis(x, 1, BLOCKS[-1]).swapaxes(1, 2) for x in (q, k, v))
    out = lax.map(functools.partial(_row, spec, interpret), (*rows, first, last))
    return jnp.where(segments[:, :, None, None] > 0, out.swapaxes(1, 2)[:, :T], 0)


def _row(spec: AttentionSpec, interpret: bool, row):
    """(q [N, T, H], k and v [K, T, H], first and last [T]) -> [N, T, H]"""
    q, k, v, first, last = row
    return make_kernel(spec, interpret, first, last)(q, k, v)


def make_kernel(
    spec: AttentionSpec,
    interpret: bool,
    first: Int[Array, "T"],
    last: Int[Array, "T"],
    *,
    save_residuals: bool = False,
) -> splash.SplashAttentionKernel:
    """Splash attention of queries that see the keys from `first` to `last`; none if first > last.

    There are as many keys as queries, and neither end ever decreases from one query to the next.
    """
    T = first.shape[0]
    block = next(b for b in BLOCKS if T % b == 0)
    low, high = (x.reshape(-1, block) for x in (first, last))
    visible, next_keys, next_queries = _block_schedule(
        jnp.min(low, axis=1) // block, jnp.max(high, axis=1) // block + 1
    )
    ranges: Any = jnp.where(first > last, 1 << BITS, first << BITS | last)

    def mask(following):
        return MaskInfo(following[None], None, visible[None], None, ranges)  # shared by all heads

    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dq=block,
        block_kv_dq=block,
        block_q_dkv=block,
        block_kv_dkv=block,
    )
    return splash.SplashAttentionKernel(
        mask(next_keys),
        mask(next_keys),
        mask(next_queries),
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=save_residuals,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=spec.softcap,
        residual_checkpoint_name=SAVED_NAME,
        mask_function=_is_visible,
        interpret=interpret,
    )


def _block_schedule(
    low: Int[Array, "n"], high: Int[Array, "n"]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(visited, next_keys, next_queries), int32 [n, n]: schedule of query x key blocks.

    Query block i visits the key blocks from `low[i]` up to, but not including, `high[i]`.
    `next_keys` and `next_queries` name the block to prefetch meanwhile: the key block of the next
    visit in a row, and the first query block of a column.
    """
    n = low.shape[0]
    i, j = (lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    lows, highs = low[:, None], high[:, None]
    visible = (lows <= j) & (j < highs)
    next_keys = jnp.where(j >= highs, jnp.roll(lows, -1, axis=0), jnp.maximum(lows, j))
    begin = jnp.sum(highs <= j, axis=0, keepdims=True, dtype=jnp.int32)
    next_queries = jnp.where(visible, i, jnp.minimum(begin, n - 1))
    return visible.astype(jnp.int32), jnp.minimum(next_keys, n - 1), next_queries


def _is_visible(ranges: jax.Array, key: jax.Array) -> jax.Array:
    """Whether each query's range contains the key."""
    first = lax.shift_right_logical(ranges, jnp.full_like(ranges, BITS))
    return (key >= first) & (key <= (ranges & (MAX_LEN - 1)))
