"""Splash attention, JAX's Pallas kernel for TPU, on packed rows.

The keys visible to a query are one range, from the first that segment and window allow to its own
position. Both ends are packed into one int32 per query. Key blocks without a visible key are
neither read nor computed. Sliding windows may be traced; query heads share their kv head without
repeating it. Scores, softmax and sums are float32; matrix products use the operands' dtype.

Rows whose segments share prefixes take one call per level of their tree (key_ranges.py). Means are
combined by the logs of their softmax denominators, in float32, and stored in the operands' dtype.
"""

import dataclasses
import functools
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
        rules=spec.rules,
    )


def check_row_len(n_tokens: int) -> None:
    """Raises NotImplementedError if a device's rows are too long for two positions in an int32."""
    if n_tokens > MAX_LEN:
        raise NotImplementedError(
            f"config.model.attention='splash' supports rows of up to {MAX_LEN} tokens, this one "
            f"has {n_tokens}; set it to 'auto' or 'blockwise', or lower config.learner.buckets"
        )


@dataclasses.dataclass(frozen=True)
class SplashBlocks:
    """Attention of queries to one range of keys each; queries are scaled before.

    Arrays are [B, N, T, H]. A `BlockKernel` of ring attention.
    """

    spec: AttentionSpec
    interpret: bool
    heads_first: bool = True
    block: int = BLOCKS[-1]

    def forward(self, q, k, v, first, last) -> tuple[jax.Array, jax.Array]:
        """(mean like q, log Σ exp(score) [B, N, T]); zeros and MASKED without visible keys."""
        return lax.map(lambda row: self.forward_row(*row), (q, k, v, first, last))

    def forward_row(self, q, k, v, first, last) -> tuple[jax.Array, jax.Array]:
        """`forward` of one row; arrays without B."""
        kernel = make_kernel(self.spec, self.interpret, first, last, save_residuals=True)
        out, (norm,) = kernel(q, k, v)
        seen = norm > MASKED  # else the mean is that of all keys, or 0 / 0
        return jnp.where(seen[..., None], out, 0), jnp.where(seen, norm, MASKED)

    def backward(self, q, k, v, out, norm, d_out, first, last) -> tuple[jax.Array, ...]:
        """Contribution of these keys to (dq, dk, dv); `out` and `norm` are of all keys."""
        # Padding after the row has no gradient, but its denominator must be finite.
        norm = jnp.where(norm > MASKED, norm, 0.0)
        rows = q, k, v, out, norm, d_out, first, last
        return lax.map(lambda row: self.backward_row(*row), rows)

    def backward_row(self, q, k, v, out, norm, d_out, first, last) -> tuple[jax.Array, ...]:
        """`backward` of one row, with finite `norm`."""
        kernel = make_kernel(self.spec, self.interpret, first, last)
        saved = q, k, v, None, None, out, norm, kernel.dq_mask_info, kernel.dkv_mask_info
        # The library has no public backward pass with given denominators.
        return splash._splash_attention_bwd(**kernel.kwargs, res=saved, do=d_out)[3:6]


def _local_attention(kernel: SplashBlocks, q, k, v, segments, window, visibility):
    T = q.shape[1]
    ranges = KeyRanges.of(segments, window, visibility, multiple=kernel.block)
    q = (q.astype(jnp.float32) * kernel.spec.scale).astype(q.dtype)
    q, k, v = (pad_axis(x, 1, kernel.block).swapaxes(1, 2) for x in (q, k, v))
    attend = _row if visibility is None else _tree_row
    out = lax.map(functools.partial(attend, kernel), (q, k, v, ranges))
    return jnp.where(segments[:, :, None, None] > 0, out.swapaxes(1, 2)[:, :T], 0)


def _row(kernel: SplashBlocks, row):
    """(q [N, T, H], k and v [K, T, H], ranges of one level) -> [N, T, H]"""
    q, k, v, ranges = row
    return make_kernel(kernel.spec, kernel.interpret, ranges.first, ranges.last)(q, k, v)


def _tree_row(kernel: SplashBlocks, row):
    """(q [N, T, H], k and v [K, T, H], ranges) -> [N, T, H]"""
    return _attend_to_tree(kernel, *row)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_to_tree(kernel: SplashBlocks, q, k, v, ranges: KeyRanges):
    return _tree_forward(kernel, q, k, v, ranges)[0]


def _tree_forward(kernel: SplashBlocks, q, k, v, ranges: KeyRanges):
    def attend(ranges: KeyRanges):
        return kernel.forward_row(q, k, v, ranges.first, ranges.last)

    def add(ranges: KeyRanges, so_far):
        (out, norm), (more, more_norm) = so_far, attend(ranges)
        out, norm = combine(out, norm, more, more_norm)
        return out.astype(q.dtype), norm  # exact up to the second level

    out, norm = checkpoint_name(ranges.fold(add, attend(ranges)), SAVED_NAME)
    return out, (q, k, v, ranges, out, norm)


def _tree_backward(kernel: SplashBlocks, saved, d_out):
    q, k, v, ranges, out, norm = saved

    def backward(ranges: KeyRanges):
        return kernel.backward_row(q, k, v, out, norm, d_out, ranges.first, ranges.last)

    def add(ranges: KeyRanges, grads):
        return jax.tree.map(jnp.add, grads, backward(ranges))

    return *ranges.fold(add, backward(ranges)), None


_attend_to_tree.defvjp(_tree_forward, _tree_backward)


def make_kernel(
    spec: AttentionSpec,
    interpret: bool,
    first: Int[Array, "T"],
    last: Int[Array, "T"],
    *,
    save_residuals: bool = False,
) -> splash.SplashAttentionKernel:
    """Splash attention of queries that see the keys from `first` to `last`; none if first > last.

    There are as many keys as queries. With `save_residuals` it also returns the logs of the softmax
    denominators, and has no backward pass.
    """
    T = first.shape[0]
    block = next(b for b in BLOCKS if T % b == 0)
    visible = seen_by_ranges(first, last, block=block, n_keys=T)
    next_keys, next_queries = _block_schedule(visible)
    ranges: Any = jnp.where(first > last, 1 << POSITION_BITS, first << POSITION_BITS | last)

    def mask(following):
        visited = visible.astype(jnp.int32)
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
        mask(next_keys),
        mask(next_keys),
        mask(next_queries),
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=save_residuals,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=spec.softcap,
        residual_checkpoint_name=None if save_residuals else SAVED_NAME,
        mask_function=_is_visible,
        interpret=interpret,
    )


def _block_schedule(visible: Bool[Array, "n n"]) -> tuple[jax.Array, jax.Array]:
    """(next_keys, next_queries), int32 [n, n]: the blocks to prefetch while pairs are skipped.

    `visible` says which query blocks visit which key blocks. The forward pass visits the pairs row
    by row, and prefetches the key block of the next one. The backward pass for keys visits them
    column by column, for all heads of a column before the next: it prefetches the next query block
    of the column, or else its first.
    """
    n = visible.shape[0]
    i, j = (lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    following = jnp.where(visible, i * n + j, n * n - 1).reshape(-1)
    next_keys = lax.cummin(following, reverse=True).reshape(n, n) % n
    below = lax.cummin(jnp.where(visible, i, n), axis=0, reverse=True)
    next_queries = jnp.where(below < n, below, jnp.minimum(below[:1], n - 1))
    return next_keys, next_queries


def _is_visible(ranges: jax.Array, key: jax.Array) -> jax.Array:
    """Whether each query's range contains the key."""
    first = lax.shift_right_logical(ranges, jnp.full_like(ranges, POSITION_BITS))
    return (key >= first) & (key <= (ranges & (MAX_LEN - 1)))
