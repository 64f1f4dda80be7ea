"""Packed attention block by block, without a [T, T] score matrix.

Blocks of queries visit blocks of 64 keys (online_softmax.py), in the order of the row and only
those that one of the queries can see. The backward pass keeps the output and one number per query.
Forward and backward follow https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.online_softmax import (
    BLOCK,
    MASKED,
    Softmax,
    add_block,
    block_scores,
    init_softmax,
    matmul,
    normalize,
    pad_axis,
)
from jaxrl.kernels.attention_spec import SAVED_NAME, AttentionSpec
from jaxrl.kernels.shard_attention import shard_attention
from jaxrl.kernels.sinks import add_sinks, row_sinks, sink_gradient
from jaxrl.kernels.visibility import (
    Queries,
    Visibility,
    seen_blocks,
    separate_segments,
    visible_pairs,
    visits,
)

QUERY_BLOCK = 128  # query positions, of G rows each


@struct.dataclass
class Mask:
    """Which keys each query sees, and the key blocks that each query block visits."""

    queries: Queries
    keys: Visibility  # [B, S], padded to whole blocks
    start: Any  # int32 [], place of the first key
    visited: Any  # int32 [n, S / 64], key blocks in the order of the row
    count: Any  # int32 [n], of these

    @classmethod
    def of(cls, queries: Queries, keys: Visibility, start: int | jax.Array = 0):
        """The mask of `in_blocks` queries and unpadded keys, whose first one has the place."""
        until = pad_axis(keys.until + 1, 1, BLOCK) - 1  # -1: no query sees the padding
        keys = Visibility(until, pad_axis(keys.positions, 1, BLOCK))
        visited, count = visits(seen_blocks(queries, keys, start=start, block=BLOCK))
        visited = visited.reshape(-1, visited.shape[-1])
        return cls(queries, keys, jnp.asarray(start, jnp.int32), visited, count.reshape(-1))

    def visible(self, row, i, j):
        """bool [1, M, 64]: which keys of block j of the row query block i sees."""
        queries, at = jax.tree.map(lambda a: a[i], self.queries), j * BLOCK
        keys = jax.tree.map(lambda a: lax.dynamic_slice(a, (row, at), (1, BLOCK))[0], self.keys)
        key = self.start + at + jnp.arange(BLOCK, dtype=jnp.int32)
        return visible_pairs(
            queries.place, queries.oldest, key, keys.until, keys.positions, queries.ahead
        )[None]


def attention_blockwise(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None = None,
    sinks: Float[Array, "N"] | None = None,
    query_block: int = QUERY_BLOCK,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v on each device's rows and heads."""
    attend = functools.partial(_local_attention, spec, query_block)
    return shard_attention(
        attend,
        q,
        k,
        v,
        segments=segments,
        window=window,
        visibility=visibility,
        sinks=sinks,
        rules=spec.rules,
    )


def _local_attention(
    spec: AttentionSpec, query_block: int, q, k, v, segments, window, visibility, sinks
):
    T = q.shape[1]
    block = min(query_block, T + -T % BLOCK)
    visibility = visibility or separate_segments(segments)
    queries = Queries.of(segments, visibility, window)
    return attend_blocks(spec, block, q, k, v, queries, visibility, sinks)


def attend_blocks(
    spec: AttentionSpec, block: int, q, k, v, queries: Queries, keys: Visibility, sinks
):
    """Attention of whole rows [B, T, N, H] to [B, T, K, H], in blocks of queries."""
    B, T, N, H = q.shape
    G = N // k.shape[2]
    mask = Mask.of(in_blocks(queries, block, copies=G), keys)
    sinks = row_sinks(sinks, N // G, block)
    out = _flash(spec, query_rows(q, G, block), key_rows(k), _value_rows(v), mask, sinks)
    return from_query_rows(out, B, G, block)[:, :T, :, :H].astype(q.dtype)


def blocks_of(bound, block: int):
    """int32 [B, T] -> [B * blocks, block], padded with -1 (no visible key)."""
    return pad_axis(bound + 1, 1, block).reshape(-1, block) - 1


def in_blocks(queries: Queries, block: int, copies: int) -> Queries:
    """[B, T] -> [B * blocks, block * copies], with every query `copies` times."""
    return jax.tree.map(lambda a: jnp.repeat(blocks_of(a, block), copies, -1), queries)


def query_rows(q, G: int, block: int):
    """[B, T, N, H] -> float32 [B * blocks, K, block * G, H]"""
    B, _, N, H = q.shape
    q = pad_axis(q.astype(jnp.float32), 1, block).reshape(B, -1, block, N // G, G, H)
    return q.transpose(0, 1, 3, 2, 4, 5).reshape(-1, N // G, block * G, H)


def from_query_rows(out, B: int, G: int, block: int):
    """[B * blocks, K, block * G, W] -> [B, T, N, W], with T a multiple of the block."""
    K, W = out.shape[1], out.shape[-1]
    out = out.reshape(B, -1, K, block, G, W)
    return out.transpose(0, 1, 3, 2, 4, 5).reshape(B, -1, K * G, W)


def key_rows(k):
    """[B, T, K, H] -> float32 [B, K, T, H], with T padded to a multiple of 64."""
    return pad_axis(k.astype(jnp.float32), 1, BLOCK).swapaxes(1, 2)


def _value_rows(v):
    """[B, T, K, H] -> float32 [B, K, T, W]"""
    return pad_axis(key_rows(v), 3, BLOCK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(spec: AttentionSpec, q, k, v, mask: Mask, sinks):
    """q [n, K, M, H], k [B, K, T, H], v [B, K, T, W] -> [n, K, M, W]; n / B blocks per row.

    Sinks are [K, M], or None.
    """
    return _flash_forward(spec, q, k, v, mask, sinks)[0]


def _flash_forward(spec: AttentionSpec, q, k, v, mask: Mask, sinks):
    per_row = q.shape[0] // k.shape[0]

    def query_block(i):
        state = init_softmax(q.shape[1:3], v.shape[-1])
        return normalize(accumulate_keys(spec, state, q[i], k, v, i // per_row, mask, i))

    out, norm = lax.map(query_block, jnp.arange(q.shape[0]))
    out, norm = add_sinks(out, norm, sinks)
    out, norm = checkpoint_name((out, norm), SAVED_NAME)
    return out, (q, k, v, mask, sinks, out, norm)


def accumulate_keys(spec: AttentionSpec, state: Softmax, q_i, k, v, row, mask: Mask, i) -> Softmax:
    """The softmax state of query block i after the keys of `row` that are visible to it."""

    def key_block(visit, state):
        j = mask.visited[i, visit]
        k_j, v_j = _key_block(k, row, j), _key_block(v, row, j)
        return add_block(state, q_i, k_j, v_j, mask.visible(row, i, j), spec)

    return lax.fori_loop(0, mask.count[i], key_block, state)


def _flash_backward(spec: AttentionSpec, saved, d_out):
    q, k, v, mask, sinks, out, norm = saved
    per_row = q.shape[0] // k.shape[0]
    delta = jnp.sum(out * d_out, axis=-1)

    def query_block(grads, i):
        dq, dk, dv = jnp.zeros_like(q[i]), *grads
        rows = q[i], d_out[i], norm[i], delta[i]
        dq, dk, dv = accumulate_gradients(spec, (dq, dk, dv), rows, k, v, i // per_row, mask, i)
        return (dk, dv), dq

    grads = jnp.zeros_like(k), jnp.zeros_like(v)
    (dk, dv), dq = lax.scan(query_block, grads, jnp.arange(q.shape[0]))
    return dq, dk, dv, None, sink_gradient(sinks, norm, out, d_out)


def accumulate_gradients(spec: AttentionSpec, grads, rows, k, v, row, mask: Mask, i):
    """Adds the contribution of the visible keys of `row` to (dq of query block i, dk, dv).

    `rows` is (q, d_out, log of the softmax denominator, Σ out d_out) of the query block.
    """
    q_i, do_i, norm_i, delta_i = rows

    def key_block(visit, carry):
        j = mask.visited[i, visit]
        dq, dk, dv = carry
        k_j, v_j = _key_block(k, row, j), _key_block(v, row, j)
        scores = block_scores(q_i, k_j, spec)
        visible = mask.visible(row, i, j)
        p = jnp.exp(jnp.where(visible, scores - norm_i[..., None], MASKED))
        ds = p * (matmul(do_i, v_j, transpose_b=True) - delta_i[..., None]) * spec.scale
        if spec.softcap is not None:
            ds *= 1.0 - (scores / spec.softcap) ** 2
        dv = _add_block(dv, matmul(p, do_i, transpose_a=True), row, j)
        dk = _add_block(dk, matmul(ds, q_i, transpose_a=True), row, j)
        return dq + matmul(ds, k_j), dk, dv

    return lax.fori_loop(0, mask.count[i], key_block, grads)


_flash.defvjp(_flash_forward, _flash_backward)


def _key_block(keys, row, j):
    """[K, 64, H] of [B, K, T, H]"""
    size = (1, keys.shape[1], BLOCK, keys.shape[3])
    return lax.dynamic_slice(keys, (row, 0, j * BLOCK, 0), size)[0]


def _add_block(total, block, row, j):
    at = (row, 0, j * BLOCK, 0)
    return lax.dynamic_update_slice(total, (_key_block(total, row, j) + block)[None], at)
