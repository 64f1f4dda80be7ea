"""Splash attention, JAX's Pallas kernel for TPU, on packed rows.

The keys visible to a query are one range, from the first that segment and window allow to its own
position. Both ends are packed into one int32 per query. Key blocks without a visible key are
neither read nor computed. Sliding windows may be traced; query heads share their kv head without
repeating it. Scores, softmax and sums are float32; matrix products use the operands' dtype.

Rows whose segments share prefixes take one call per level of their tree (key_ranges.py). Means are
combined by the logs of their softmax denominators, in float32, and stored in the operands' dtype.
Rows with sinks take the same way, because the library's own backward pass keeps no sums.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.attention.limits import MAX_LEN, POSITION_BITS
from jaxrl.kernels.attention.online_softmax import MASKED, combine, pad_axis
from jaxrl.kernels.attention_spec import SAVED_NAME, AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.key_ranges import KeyRanges, seen_by_ranges
from jaxrl.kernels.shard_attention import shard_attention
from jaxrl.kernels.sinks import add_sinks, sink_gradient
from jaxrl.kernels.visibility import Visibility

BLOCKS = (512, 256, 128)  # tokens per query block and key block: the largest that divides the row


def attention_splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None = None,
    sinks: Float[Array, "N"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v on each device's rows and heads.

    `interpret` emulates the kernel with XLA on any backend. Raises NotImplementedError without a
    TPU and for rows of more than 65,536 tokens.
    """
    if not interpret:
        check_platform("config.model.attention", "splash", "tpu")
    check_row_len(q.shape[1])
    return shard_attention(
        functools.partial(_local_attention, SplashBlocks(spec, interpret)),
        q,
        k,
        v,
        segments=segments,
        window=window,
        visibility=visibility,
        sinks=sinks,
        rules=spec.rules,
    )


def check_row_len(n_tokens: int) -> None:
    """Raises NotImplementedError if a device's rows are too long for two positions in an int32."""
    if n_tokens > MAX_LEN:
        raise NotImplementedError(
            f"config.model.attention='splash' supports rows of up to {MAX_LEN} tokens, this one "
            f"has {n_tokens}; set it to 'auto' or 'blockwise', or lower config.learner.buckets"
        )


def scaled(k: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Keys by which the kernel, which has no scale, gives scores q kᵀ * scale.

    There are fewer of them than queries.
    """
    return (k.astype(jnp.float32) * spec.scale).astype(k.dtype)


@dataclasses.dataclass(frozen=True)
class SplashBlocks:
    """Attention of queries to one range of keys each; keys are scaled before.

    A call takes the B rows of a device as one array [N, M, H] with M = B * T; the ranges are places
    in the rows. `forward` and `backward` make it a `BlockKernel` of ring attention, with arrays
    [B, N, T, H].
    """

    spec: AttentionSpec
    interpret: bool
    heads_first: bool = True
    block: int = BLOCKS[-1]

    def forward(self, q, k, v, first, last) -> tuple[jax.Array, jax.Array]:
        """(mean like q, log Σ exp(score) [B, N, T]); zeros and MASKED without visible keys."""

        def attend(rows):
            (q, k, v), (first, last) = (_join(x) for x in rows[:3]), rows[3:]
            means = self.forward_rows(q, k, v, first, last)
            return tuple(_split(x, len(first)) for x in means)

        return _by_groups(attend, (q, k, v, first, last))

    def forward_rows(self, q, k, v, first, last) -> tuple[jax.Array, jax.Array]:
        """`forward` of arrays [N, M, H]."""
        out, norm = self.means(q, k, v, first, last)
        seen = norm > MASKED  # else the mean is that of all keys, or 0 / 0
        return jnp.where(seen[..., None], out, 0), jnp.where(seen, norm, MASKED)

    def means(self, q, k, v, first, last) -> tuple[jax.Array, jax.Array]:
        """`forward_rows` of queries that all see a key."""
        kernel = make_kernel(self.spec, self.interpret, first, last, save_residuals=True)
        out, (norm,) = kernel(q, k, v)
        return out, norm

    def backward(self, q, k, v, out, norm, d_out, first, last) -> tuple[jax.Array, ...]:
        """Contribution of these keys to (dq, dk, dv); `out` and `norm` are of all keys."""
        # Padding after the row has no gradient, but its denominator must be finite.
        norm = jnp.where(norm > MASKED, norm, 0.0)

        def attend(rows):
            q, k, v, out, norm, d_out = (_join(x) for x in rows[:6])
            first, last = rows[6:]
            grads = self.backward_rows(q, k, v, out, norm, d_out, first, last)
            return tuple(_split(x, len(first)) for x in grads)

        return _by_groups(attend, (q, k, v, out, norm, d_out, first, last))

    def backward_rows(self, q, k, v, out, norm, d_out, first, last) -> tuple[jax.Array, ...]:
        """`backward` of arrays [N, M, H], with finite `norm`."""
        kernel = make_kernel(self.spec, self.interpret, first, last)
        saved = q, k, v, None, None, out, norm, kernel.dq_mask_info, kernel.dkv_mask_info
        # The library has no public backward pass with given denominators.
        return splash._splash_attention_bwd(**kernel.kwargs, res=saved, do=d_out)[3:6]


def _join(x: jax.Array) -> jax.Array:
    """[B, N, T, ...] -> [N, B * T, ...]"""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _split(x: jax.Array, n_rows: int) -> jax.Array:
    """[N, B * T, ...] -> [B, N, T, ...]"""
    return x.reshape(x.shape[0], n_rows, -1, *x.shape[2:]).swapaxes(0, 1)


def _by_groups(attend: Callable[[Any], Any], rows: Any) -> Any:
    """`attend(rows)`, arrays [B, ...] of which the last is [B, T], for MAX_LEN tokens at a time."""
    B, T = jax.tree.leaves(rows)[-1].shape
    n = max(n for n in range(1, B + 1) if B % n == 0 and (n == 1 or n * T <= MAX_LEN))
    if n == B:
        return attend(rows)
    groups = jax.tree.map(lambda a: a.reshape(B // n, n, *a.shape[1:]), rows)
    return jax.tree.map(lambda a: a.reshape(B, *a.shape[2:]), lax.map(attend, groups))


def _local_attention(kernel: SplashBlocks, q, k, v, segments, window, visibility, sinks):
    T = q.shape[1]
    ranges = KeyRanges.of(segments, window, visibility, multiple=kernel.block)
    k = scaled(k, kernel.spec)
    # Padding sees only padding, so its mean is zero.
    v = jnp.where(segments[:, :, None, None] > 0, v, 0)
    q, k, v = (pad_axis(x, 1, kernel.block).swapaxes(1, 2) for x in (q, k, v))

    def attend(rows):
        (q, k, v), ranges = (_join(x) for x in rows[:3]), rows[3]
        if visibility is None and sinks is None:
            return _split(_one_range(kernel, q, k, v, ranges), len(ranges.first))
        heads = None if sinks is None else sinks[:, None]
        return _split(_attend_to_ranges(kernel, q, k, v, ranges, heads), len(ranges.first))

    return _by_groups(attend, (q, k, v, ranges)).swapaxes(1, 2)[:, :T]


def _one_range(kernel: SplashBlocks, q, k, v, ranges: KeyRanges) -> Any:
    """(q [N, M, H], k and v [K, M, H], ranges of one level) -> [N, M, H]"""
    return make_kernel(kernel.spec, kernel.interpret, ranges.first, ranges.last)(q, k, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_to_ranges(kernel: SplashBlocks, q, k, v, ranges: KeyRanges, sinks):
    """(q [N, M, H], k and v [K, M, H], ranges, sinks [N, 1] or None) -> [N, M, H]"""
    return _ranges_forward(kernel, q, k, v, ranges, sinks)[0]


def _ranges_forward(kernel: SplashBlocks, q, k, v, ranges: KeyRanges, sinks):
    def add(ranges: KeyRanges, so_far):
        more, more_norm = kernel.forward_rows(q, k, v, ranges.first, ranges.last)
        out, norm = so_far
        out, norm = combine(out, norm, more, more_norm)
        return out.astype(q.dtype), norm  # exact up to the second level

    own = kernel.means(q, k, v, ranges.first, ranges.last)
    out, norm = checkpoint_name(add_sinks(*ranges.fold(add, own), sinks), SAVED_NAME)
    return out, (q, k, v, ranges, sinks, out, norm)


def _ranges_backward(kernel: SplashBlocks, saved, d_out):
    q, k, v, ranges, sinks, out, norm = saved

    def backward(ranges: KeyRanges):
        return kernel.backward_rows(q, k, v, out, norm, d_out, ranges.first, ranges.last)

    def add(ranges: KeyRanges, grads):
        return jax.tree.map(jnp.add, grads, backward(ranges))

    d_sinks = sink_gradient(sinks, norm, out, d_out)
    return *ranges.fold(add, backward(ranges)), None, d_sinks


_attend_to_ranges.defvjp(_ranges_forward, _ranges_backward)


def make_kernel(
    spec: AttentionSpec,
    interpret: bool,
    first: Int[Array, "B T"],
    last: Int[Array, "B T"],
    *,
    save_residuals: bool = False,
) -> splash.SplashAttentionKernel:
    """Splash attention [N, B * T, H] of rows whose queries see their row's keys first to last.

    They see none if first > last. There are as many keys as queries. With `save_residuals` it also
    returns the logs of the softmax denominators, and has no backward pass.
    """
    B, T = first.shape
    block = next(b for b in BLOCKS if T % b == 0)
    visible = seen_by_ranges(first, last, block=block, n_keys=T)
    next_keys, next_queries = _block_schedule(visible)
    start = T * jnp.arange(B, dtype=jnp.int32)[:, None]
    ends = (first + start) << POSITION_BITS | (last + start)
    ranges: Any = jnp.where(first > last, 1 << POSITION_BITS, ends).reshape(-1)

    # A block visits the n blocks of the same row: a grid of n B x n pairs, or of n x n B.
    visited = visible.astype(jnp.int32)
    by_query = visited.reshape(next_keys.shape)
    by_key = visited.swapaxes(0, 1).reshape(next_queries.shape)

    def mask(following, visited):
        return MaskInfo(following[None], None, visited[None], None, ranges)  # shared by all heads

    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dq=block,
        block_kv_dq=block,
        block_q_dkv=block,
        block_kv_dkv=block,
    )
    return splash.SplashAttentionKernel(
        mask(next_keys, by_query),
        mask(next_keys, by_query),
        mask(next_queries, by_key),
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=save_residuals,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=spec.softcap,
        residual_checkpoint_name=None if save_residuals else SAVED_NAME,
        mask_function=_is_visible,
        interpret=interpret,
    )


def _block_schedule(visible: Bool[Array, "B n n"]) -> tuple[jax.Array, jax.Array]:
    """(next_keys [B * n, n], next_queries [n, B * n]): blocks to prefetch while pairs are skipped.

    `visible` says which query blocks of a row visit which of its key blocks; blocks are numbered
    through the rows. The forward pass visits the pairs query block by query block, and prefetches
    the key block of the next one. The backward pass for keys visits them key block by key block,
    for all heads of one before the next: it prefetches the next query block of this key block, or
    else its first.
    """
    B, n, _ = visible.shape
    b, i, j = (lax.broadcasted_iota(jnp.int32, visible.shape, axis) for axis in range(3))
    following = jnp.where(visible, (b * n + i) * n + j, B * n * n - 1).reshape(-1)
    following = lax.cummin(following, reverse=True)
    next_keys = following // (n * n) * n + following % n
    below = lax.cummin(jnp.where(visible, i, n), axis=1, reverse=True)
    next_queries = b * n + jnp.where(below < n, below, jnp.minimum(below[:, :1], n - 1))
    return next_keys.reshape(B * n, n), next_queries.swapaxes(0, 1).reshape(n, B * n)


def _is_visible(ranges: jax.Array, key: jax.Array) -> jax.Array:
    """Whether each query's range contains the key."""
    first = lax.shift_right_logical(ranges, jnp.full_like(ranges, POSITION_BITS))
    return (key >= first) & (key <= (ranges & (MAX_LEN - 1)))
