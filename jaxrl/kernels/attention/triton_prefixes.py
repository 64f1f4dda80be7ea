"""Packed attention with shared prefixes on NVIDIA GPUs: the kernels of triton.py with a tree mask.

A query block visits the key blocks that one of its queries can see (visibility.py). In the backward
pass, a key block visits the query blocks up to the last that can see it, over all heads that share
its kv head. Forward and backward follow https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
Scores, softmax and sums are float32; matrix products use the operands' dtype.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl.kernels.attention.blocks import MASKED, pad_axis
from jaxrl.kernels.attention_spec import SAVED_NAME, AttentionSpec
from jaxrl.kernels.visibility import (
    Queries,
    Visibility,
    oldest_position,
    seen_blocks,
    visible_pairs,
    visits,
)

BLOCK = 64  # tokens per query block and key block


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Static parameters of the kernels; `interpret` emulates them with XLA."""

    spec: AttentionSpec
    interpret: bool

    def scores(self, q, k, visible):
        """[queries, keys] of two blocks; MASKED if invisible."""
        return jnp.where(visible, self.spec.scores(plgpu.dot(q, k, trans_b=True)), MASKED)

    def gradients(self, q, k, v, do, norm, delta, visible):
        """(softmax weights, gradients with respect to q kᵀ)."""
        scores = self.scores(q, k, visible)
        p = jnp.exp(scores - norm[:, None])
        ds = p * (plgpu.dot(do, v, trans_b=True) - delta[:, None]) * self.spec.scale
        if self.spec.softcap is not None:
            ds *= jnp.where(p > 0, 1.0 - (scores / self.spec.softcap) ** 2, 0.0)
        return p, ds

    def call(self, kernel, name: str, **options):
        return pl.pallas_call(
            functools.partial(kernel, self),
            name=name,
            interpret=self.interpret,
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
            **options,
        )


@struct.dataclass
class Rows:
    """What is visible in padded rows; padding sees itself."""

    until: Any  # int32 [B, T]
    positions: Any  # int32 [B, T]
    oldest: Any  # int32 [B, T], first position in the window of each query

    def seen(self):
        """bool [B, n, n]: which key blocks each query block visits."""
        B, T = self.until.shape
        places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        queries = Queries(places.reshape(-1, BLOCK), self.oldest.reshape(-1, BLOCK))
        return seen_blocks(queries, Visibility(self.until, self.positions), block=BLOCK)


def local_attention(kernels: Kernels, q, k, v, segments, window, visibility):
    T = q.shape[1]
    """The output of a device's rows and heads."""
    oldest = oldest_position(visibility.positions, window)
    # Padding attends to itself: a softmax over no key is not finite.
    until = jnp.where(segments > 0, visibility.until, jnp.arange(T, dtype=jnp.int32))
    padding = jnp.broadcast_to(jnp.arange(T, T + -T % BLOCK, dtype=jnp.int32), (len(q), -T % BLOCK))
    rows = Rows(
        until=jnp.concatenate([until, padding], axis=1),
        positions=pad_axis(visibility.positions, 1, BLOCK),
        oldest=pad_axis(jnp.where(segments > 0, oldest, 0), 1, BLOCK),
    )
    out = _flash(kernels, *(pad_axis(x, 1, BLOCK) for x in (q, k, v)), rows)
    return jnp.where(segments[:, :, None, None] > 0, out[:, :T], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(kernels: Kernels, q, k, v, rows: Rows):
    """q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H]; BLOCK divides T."""
    return _forward(kernels, q, k, v, rows)[0]


def _forward(kernels: Kernels, q, k, v, rows: Rows):
    B, T, N, H = q.shape
    by_block, keys, numbers, of_queries, of_keys = _specs(T, H, N // k.shape[2])
    visited, count = visits(rows.seen())
    out, norm = kernels.call(
        _forward_kernel,
        "packed_attention_fwd",
        grid=(T // BLOCK, N, B),
        in_specs=[
            *[pl.no_block_spec] * 2, by_block, keys, keys, of_keys, of_keys, of_queries,
        ],
        out_specs=[by_block, numbers],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
    )(visited, count, q, k, v, rows.until, rows.positions, rows.oldest)  # fmt: skip
    out, norm = checkpoint_name((out, norm), SAVED_NAME)
    return out, (q, k, v, rows, out, norm)


def _backward(kernels: Kernels, saved, do):
    q, k, v, rows, out, norm = saved
    B, T, N, H = q.shape
    K = k.shape[2]
    G = N // K
    delta = jnp.einsum("BTNH,BTNH->BNT", out.astype(jnp.float32), do.astype(jnp.float32))
    by_block, keys, numbers, of_queries, of_keys = _specs(T, H, G)
    seen, masks = rows.seen(), (rows.until, rows.positions, rows.oldest)
    visited, count = visits(seen)
    dq = kernels.call(
        _dq_kernel,
        "packed_attention_dq",
        grid=(T // BLOCK, N, B),
        in_specs=[
            *[pl.no_block_spec] * 2, by_block, keys, keys, by_block, numbers, numbers,
            of_keys, of_keys, of_queries,
        ],
        out_specs=by_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(visited, count, q, k, v, do, norm, delta, *masks)  # fmt: skip

    # A key block visits the query blocks from its own to the last that sees it.
    begin = jnp.broadcast_to(jnp.arange(T // BLOCK, dtype=jnp.int32), (B, T // BLOCK))
    after = jnp.arange(1, T // BLOCK + 1, dtype=jnp.int32)
    high = jnp.max(jnp.where(seen, after[:, None], 0), axis=1)
    queries = pl.BlockSpec((None, T, G, H), lambda j, h, b: (b, 0, h, 0))
    per_head = pl.BlockSpec((None, G, T), lambda j, h, b: (b, h, 0))
    key_block = pl.BlockSpec((None, BLOCK, None, H), lambda j, h, b: (b, j, h, 0))
    all_queries = pl.BlockSpec((None, T), lambda j, h, b: (b, 0))
    own_keys = pl.BlockSpec((None, BLOCK), lambda j, h, b: (b, j))
    dk, dv = kernels.call(
        _dkv_kernel,
        "packed_attention_dkv",
        grid=(T // BLOCK, K, B),
        in_specs=[
            *[pl.no_block_spec] * 2, queries, key_block, key_block, queries, per_head, per_head,
            own_keys, own_keys, all_queries,
        ],
        out_specs=[key_block, key_block],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
    )(begin, high, q, k, v, do, norm, delta, *masks)  # fmt: skip
    return dq, dk, dv, None


_flash.defvjp(_forward, _backward)


def _specs(T: int, H: int, G: int) -> tuple[pl.BlockSpec, ...]:
    """Block specs of queries, keys, numbers, and of one number per query of a block or per key.

    The grid is (query block, head, row).
    """
    return (
        pl.BlockSpec((None, BLOCK, None, H), lambda i, n, b: (b, i, n, 0)),
        pl.BlockSpec((None, T, None, H), lambda i, n, b: (b, 0, lax.div(n, G), 0)),
        pl.BlockSpec((None, None, BLOCK), lambda i, n, b: (b, n, i)),
        pl.BlockSpec((None, BLOCK), lambda i, n, b: (b, i)),
        pl.BlockSpec((None, T), lambda i, n, b: (b, 0)),
    )


def _visible(i, j, oldest, until, positions):
    """Which keys of block j the queries of block i see."""
    tokens = jnp.arange(BLOCK)
    return visible_pairs(i * BLOCK + tokens, oldest, j * BLOCK + tokens, until, positions)


def _forward_kernel(
    kernels: Kernels,
    visited,
    count,
    q_ref,
    k_ref,
    v_ref,
    until_ref,
    positions_ref,
    oldest_ref,
    out_ref,
    norm_ref,
):
    i, b = pl.program_id(0), pl.program_id(2)
    q, oldest = q_ref[...], oldest_ref[...]

    def block(visit, state):
        max_score, denominator, numerator = state
        j = visited[b, i, visit]
        at = pl.ds(j * BLOCK, BLOCK)
        visible = _visible(i, j, oldest, until_ref[at], positions_ref[at])
        scores = kernels.scores(q, k_ref[at, :], visible)
        new_max = jnp.maximum(max_score, jnp.max(scores, axis=1))
        weights, correction = jnp.exp(scores - new_max[:, None]), jnp.exp(max_score - new_max)
        v = v_ref[at, :]
        numerator = numerator * correction[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return new_max, denominator * correction + jnp.sum(weights, axis=1), numerator

    empty = jnp.full(BLOCK, MASKED), jnp.zeros(BLOCK), jnp.zeros(q.shape)
    max_score, denominator, numerator = lax.fori_loop(0, count[b, i], block, empty)
    out_ref[...] = (numerator / denominator[:, None]).astype(out_ref.dtype)
    norm_ref[...] = max_score + jnp.log(denominator)


def _dq_kernel(
    kernels: Kernels,
    visited,
    count,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    norm_ref,
    delta_ref,
    until_ref,
    positions_ref,
    oldest_ref,
    dq_ref,
):
    i, b = pl.program_id(0), pl.program_id(2)
    q, do, norm, delta, oldest = (
        ref[...] for ref in (q_ref, do_ref, norm_ref, delta_ref, oldest_ref)
    )

    def block(visit, dq):
        j = visited[b, i, visit]
        at = pl.ds(j * BLOCK, BLOCK)
        k = k_ref[at, :]
        visible = _visible(i, j, oldest, until_ref[at], positions_ref[at])
        _, ds = kernels.gradients(q, k, v_ref[at, :], do, norm, delta, visible)
        return dq + plgpu.dot(ds.astype(k.dtype), k)

    dq = lax.fori_loop(0, count[b, i], block, jnp.zeros(q.shape))
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _dkv_kernel(
    kernels: Kernels,
    begin,
    high,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    norm_ref,
    delta_ref,
    until_ref,
    positions_ref,
    oldest_ref,
    dk_ref,
    dv_ref,
):
    j, b = pl.program_id(0), pl.program_id(2)
    k, v, until, positions = (ref[...] for ref in (k_ref, v_ref, until_ref, positions_ref))
    G = q_ref.shape[1]

    def head(g, grads):
        def block(i, grads):
            dk, dv = grads
            at = pl.ds(i * BLOCK, BLOCK)
            q, do = q_ref[at, g, :], do_ref[at, g, :]
            visible = _visible(i, j, oldest_ref[at], until, positions)
            p, ds = kernels.gradients(q, k, v, do, norm_ref[g, at], delta_ref[g, at], visible)
            dv += plgpu.dot(p.astype(do.dtype), do, trans_a=True)
            return dk + plgpu.dot(ds.astype(q.dtype), q, trans_a=True), dv

        return lax.fori_loop(begin[b, j], high[b, j], block, grads)

    dk, dv = lax.fori_loop(0, G, head, (jnp.zeros(k.shape), jnp.zeros(v.shape)))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
