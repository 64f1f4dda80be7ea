"""Packed attention block by block, without a [T, T] score matrix.

Blocks of queries visit blocks of 64 keys (blocks.py). Loop bounds are read from the segments: a
query block visits only the keys from its earliest segment start (or window) to its own position.
The backward pass keeps the output and one number per query. Forward and backward follow
https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.blocks import (
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

QUERY_BLOCK = 128  # query positions, of G rows each


@struct.dataclass
class Span:
    """The range of keys visible to each query, and the key blocks that each query block visits."""

    first: Any  # int32 [n, M]
    last: Any  # int32 [n, M], inclusive; -1 for padding
    low: Any  # int32 [n]
    high: Any  # int32 [n], exclusive

    @classmethod
    def of(cls, first, last):
        visible = first <= last
        low = jnp.min(jnp.where(visible, first, jnp.iinfo(jnp.int32).max), axis=-1) // BLOCK
        high = jnp.max(jnp.where(visible, last, -1), axis=-1) // BLOCK + 1
        return cls(first, last, jnp.minimum(low, high), high)


def attention_blockwise(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    query_block: int = QUERY_BLOCK,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v on each device's rows and heads."""
    attend = functools.partial(_local_attention, spec, query_block)
    return shard_attention(attend, q, k, v, segments=segments, window=window, rules=spec.rules)


def _local_attention(spec: AttentionSpec, query_block: int, q, k, v, segments, window):
    B, T, N, H = q.shape
    G = N // k.shape[2]
    block = min(query_block, T + -T % BLOCK)
    blocks = [blocks_of(a, block) for a in visible_range(segments, window)]
    span = Span.of(*(jnp.repeat(a, G, -1) for a in blocks))
    out = _flash(spec, query_rows(q, G, block), key_rows(k), _value_rows(v), span)
    return from_query_rows(out, B, G, block)[:, :T, :, :H].astype(q.dtype)


def visible_range(segments, window):
    """First and last visible key of every query, int32 [B, T]; last is -1 at padding.

    A segment is one run of equal numbers in its row.
    """
    T = segments.shape[1]
    here = jnp.arange(T, dtype=jnp.int32)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = lax.cummax(jnp.where(starts, here, 0), axis=1)
    first = jnp.where(window > 0, jnp.maximum(first, here - window + 1), first)
    return first, jnp.where(segments > 0, here, -1)


def blocks_of(bound, block: int):
    """int32 [B, T] -> [B * blocks, block], padded with -1 (no visible key)."""
    return pad_axis(bound + 1, 1, block).reshape(-1, block) - 1


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
def _flash(spec: AttentionSpec, q, k, v, span: Span):
    """q [n, K, M, H], k [B, K, T, H], v [B, K, T, W] -> [n, K, M, W]; n / B blocks per row."""
    return _flash_forward(spec, q, k, v, span)[0]


def _flash_forward(spec: AttentionSpec, q, k, v, span: Span):
    per_row = q.shape[0] // k.shape[0]

    def query_block(i):
        state = init_softmax(q.shape[1:3], v.shape[-1])
        return normalize(accumulate_keys(spec, state, q[i], k, v, i // per_row, span, i))

    out, norm = lax.map(query_block, jnp.arange(q.shape[0]))
    out, norm = checkpoint_name((out, norm), SAVED_NAME)
    return out, (q, k, v, span, out, norm)


def accumulate_keys(spec: AttentionSpec, state: Softmax, q_i, k, v, row, span: Span, i) -> Softmax:
    """The softmax state of query block i after the keys of `row` that are visible to it."""

    def key_block(j, state):
        k_j, v_j = _key_block(k, row, j), _key_block(v, row, j)
        return add_block(state, q_i, k_j, v_j, _visible(span, i, j), spec)

    return lax.fori_loop(span.low[i], span.high[i], key_block, state)


def _flash_backward(spec: AttentionSpec, saved, d_out):
    q, k, v, span, out, norm = saved
    per_row = q.shape[0] // k.shape[0]
    delta = jnp.sum(out * d_out, axis=-1)

    def query_block(grads, i):
        dq, dk, dv = jnp.zeros_like(q[i]), *grads
        rows = q[i], d_out[i], norm[i], delta[i]
        dq, dk, dv = accumulate_gradients(spec, (dq, dk, dv), rows, k, v, i // per_row, span, i)
        return (dk, dv), dq

    grads = jnp.zeros_like(k), jnp.zeros_like(v)
    (dk, dv), dq = lax.scan(query_block, grads, jnp.arange(q.shape[0]))
    return dq, dk, dv, None


def accumulate_gradients(spec: AttentionSpec, grads, rows, k, v, row, span: Span, i):
    """Adds the contribution of the visible keys of `row` to (dq of query block i, dk, dv).

    `rows` is (q, d_out, log of the softmax denominator, Σ out d_out) of the query block.
    """
    q_i, do_i, norm_i, delta_i = rows

    def key_block(j, carry):
        dq, dk, dv = carry
        k_j, v_j = _key_block(k, row, j), _key_block(v, row, j)
        scores = block_scores(q_i, k_j, spec)
        visible = _visible(span, i, j)
        p = jnp.exp(jnp.where(visible, scores - norm_i[..., None], MASKED))
        ds = p * (matmul(do_i, v_j, transpose_b=True) - delta_i[..., None]) * spec.scale
        if spec.softcap is not None:
            ds *= 1.0 - (scores / spec.softcap) ** 2
        dv = _add_block(dv, matmul(p, do_i, transpose_a=True), row, j)
        dk = _add_block(dk, matmul(ds, q_i, transpose_a=True), row, j)
        return dq + matmul(ds, k_j), dk, dv

    return lax.fori_loop(span.low[i], span.high[i], key_block, grads)


_flash.defvjp(_flash_forward, _flash_backward)


def _visible(span: Span, i, j):
    """bool [1, M, 64]: which keys of block j are visible to the rows of query block i."""
    key = j * BLOCK + jnp.arange(BLOCK)
    return ((key >= span.first[i][:, None]) & (key <= span.last[i][:, None]))[None]


def _key_block(keys, row, j):
    """[K, 64, H] of [B, K, T, H]"""
    size = (1, keys.shape[1], BLOCK, keys.shape[3])
    return lax.dynamic_slice(keys, (row, 0, j * BLOCK, 0), size)[0]


def _add_block(total, block, row, j):
    at = (row, 0, j * BLOCK, 0)
    return lax.dynamic_update_slice(total, (_key_block(total, row, j) + block)[None], at)
