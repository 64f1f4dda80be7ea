"""Packed attention on NVIDIA GPUs: Pallas kernels in Triton, forward and backward.

The keys visible to a query are one range, from the first that segment and window allow to its own
position. A query block visits the key blocks from the first that one of its queries can see. In the
backward pass, a key block visits the queries up to the last that can see it, over all heads that
share its kv head. Forward and backward follow https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
Scores, softmax and sums are float32; matrix products use the operands' dtype.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.blocks import MASKED, pad_axis
from jaxrl.kernels.attention.blockwise import visible_range
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.shard_attention import shard_attention

BLOCK = 64  # tokens per query block and key block
MIN_ROWS = 16  # of a tensor-core matrix product


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Static parameters of the kernels; `interpret` emulates them with XLA."""

    spec: AttentionSpec
    interpret: bool

    def scores(self, q, k, first, at_q, at_k):
        """[queries, keys] of the blocks starting at these positions; MASKED if invisible."""
        scores = self.spec.scores(plgpu.dot(q, k, trans_b=True))
        query = at_q + jnp.arange(len(q))
        key = at_k + jnp.arange(len(k))
        visible = (key[None] >= first[:, None]) & (key[None] <= query[:, None])
        return jnp.where(visible, scores, MASKED)

    def gradients(self, q, k, v, do, norm, delta, first, at_q, at_k):
        """(softmax weights, gradients with respect to q kᵀ)."""
        scores = self.scores(q, k, first, at_q, at_k)
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


def unsupported_by_triton(q: jax.Array) -> str | None:
    """What the kernels do not support about these queries; None if they do."""
    H = q.shape[-1]
    if H < MIN_ROWS or H & (H - 1):
        return f"heads of width {H}, no power of two"
    return None


def attention_triton(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v on each device's rows and heads.

    `interpret` emulates the kernels with XLA on any backend. Raises NotImplementedError without a
    GPU and for head widths that are not a power of two.
    """
    if not interpret:
        check_platform("config.model.attention", "triton", "gpu")
    if why := unsupported_by_triton(q):
        raise NotImplementedError(
            f"config.model.attention='triton' does not support {why}; set it to 'auto' or "
            "'blockwise'"
        )
    attend = functools.partial(_local_attention, Kernels(spec, interpret))
    return shard_attention(attend, q, k, v, segments=segments, window=window, rules=spec.rules)


def _local_attention(kernels: Kernels, q, k, v, segments, window):
    T = q.shape[1]
    first, last = visible_range(segments, window)
    # Padding attends to itself: a softmax over no key is not finite.
    first = jnp.where(last >= 0, first, jnp.arange(T))
    first = jnp.pad(first, ((0, 0), (0, -T % BLOCK)), constant_values=T)
    out = _flash(kernels, *(pad_axis(x, 1, BLOCK) for x in (q, k, v)), first)
    return jnp.where(segments[:, :, None, None] > 0, out[:, :T], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(kernels: Kernels, q, k, v, first):
    """q [B, T, N, H], k and v [B, T, K, H], first [B, T] -> [B, T, N, H]; BLOCK divides T."""
    return _forward(kernels, q, k, v, first)[0]


def _forward(kernels: Kernels, q, k, v, first):
    B, T, N, H = q.shape
    G = N // k.shape[2]
    by_block, keys, numbers, starts = _specs(T, H, G)
    out, norm = kernels.call(
        _forward_kernel,
        "packed_attention_fwd",
        grid=(T // BLOCK, N, B),
        in_specs=[pl.no_block_spec, by_block, keys, keys, starts],
        out_specs=[by_block, numbers],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
    )(_first_key_blocks(first), q, k, v, first)
    return out, (q, k, v, first, out, norm)


def _backward(kernels: Kernels, saved, do):
    q, k, v, first, out, norm = saved
    B, T, N, H = q.shape
    K = k.shape[2]
    G = N // K
    delta = jnp.einsum("BTNH,BTNH->BNT", out.astype(jnp.float32), do.astype(jnp.float32))
    low = _first_key_blocks(first)
    by_block, keys, numbers, starts = _specs(T, H, G)
    dq = kernels.call(
        _dq_kernel,
        "packed_attention_dq",
        grid=(T // BLOCK, N, B),
        in_specs=[pl.no_block_spec, by_block, keys, keys, by_block, numbers, numbers, starts],
        out_specs=by_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(low, q, k, v, do, norm, delta, first)

    # Key block j is visible to the query blocks from j to high: `low` never decreases.
    j = jnp.arange(T // BLOCK)
    high = jnp.sum(low[:, None, :] <= j[:, None], axis=-1, dtype=jnp.int32)
    queries = pl.BlockSpec((None, T, G, H), lambda j, h, b: (b, 0, h, 0))
    per_head = pl.BlockSpec((None, G, T), lambda j, h, b: (b, h, 0))
    key_block = pl.BlockSpec((None, BLOCK, None, H), lambda j, h, b: (b, j, h, 0))
    dk, dv = kernels.call(
        _dkv_kernel,
        "packed_attention_dkv",
        grid=(T // BLOCK, K, B),
        in_specs=[
            pl.no_block_spec, queries, key_block, key_block, queries, per_head, per_head,
            pl.BlockSpec((None, T), lambda j, h, b: (b, 0)),
        ],
        out_specs=[key_block, key_block],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
    )(high, q, k, v, do, norm, delta, first)  # fmt: skip
    return dq, dk, dv, None


_flash.defvjp(_forward, _backward)


def _first_key_blocks(first: Int[Array, "B T"]) -> Int[Array, "B n"]:
    """First visible key block of each query block."""
    return jnp.min(first.reshape(first.shape[0], -1, BLOCK), axis=-1) // BLOCK


def _specs(T: int, H: int, G: int) -> tuple[pl.BlockSpec, ...]:
    """Block specs of queries, keys, numbers and starts, for grid (query block, head, row)."""
    return (
        pl.BlockSpec((None, BLOCK, None, H), lambda i, n, b: (b, i, n, 0)),
        pl.BlockSpec((None, T, None, H), lambda i, n, b: (b, 0, lax.div(n, G), 0)),
        pl.BlockSpec((None, None, BLOCK), lambda i, n, b: (b, n, i)),
        pl.BlockSpec((None, BLOCK), lambda i, n, b: (b, i)),
    )


def _forward_kernel(kernels: Kernels, low, q_ref, k_ref, v_ref, first_ref, out_ref, norm_ref):
    i, b = pl.program_id(0), pl.program_id(2)
    q, first = q_ref[...], first_ref[...]

    def block(j, state):
        max_score, denominator, numerator = state
        at = pl.ds(j * BLOCK, BLOCK)
        scores = kernels.scores(q, k_ref[at, :], first, i * BLOCK, j * BLOCK)
        new_max = jnp.maximum(max_score, jnp.max(scores, axis=1))
        weights, correction = jnp.exp(scores - new_max[:, None]), jnp.exp(max_score - new_max)
        v = v_ref[at, :]
        numerator = numerator * correction[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return new_max, denominator * correction + jnp.sum(weights, axis=1), numerator

    empty = jnp.full(BLOCK, MASKED), jnp.zeros(BLOCK), jnp.zeros(q.shape)
    max_score, denominator, numerator = lax.fori_loop(low[b, i], i + 1, block, empty)
    out_ref[...] = (numerator / denominator[:, None]).astype(out_ref.dtype)
    norm_ref[...] = max_score + jnp.log(denominator)


def _dq_kernel(
    kernels: Kernels, low, q_ref, k_ref, v_ref, do_ref, norm_ref, delta_ref, first_ref, dq_ref
):
    i, b = pl.program_id(0), pl.program_id(2)
    q, do, norm, delta, first = (
        ref[...] for ref in (q_ref, do_ref, norm_ref, delta_ref, first_ref)
    )

    def block(j, dq):
        at = pl.ds(j * BLOCK, BLOCK)
        k = k_ref[at, :]
        _, ds = kernels.gradients(q, k, v_ref[at, :], do, norm, delta, first, i * BLOCK, j * BLOCK)
        return dq + plgpu.dot(ds.astype(k.dtype), k)

    dq = lax.fori_loop(low[b, i], i + 1, block, jnp.zeros(q.shape))
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _dkv_kernel(
    kernels: Kernels,
    high,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    norm_ref,
    delta_ref,
    first_ref,
    dk_ref,
    dv_ref,
):
    j, b = pl.program_id(0), pl.program_id(2)
    k, v = k_ref[...], v_ref[...]
    G = q_ref.shape[1]

    def head(g, grads):
        def block(i, grads):
            dk, dv = grads
            at = pl.ds(i * BLOCK, BLOCK)
            q, do = q_ref[at, g, :], do_ref[at, g, :]
            p, ds = kernels.gradients(
                q, k, v, do, norm_ref[g, at], delta_ref[g, at], first_ref[at], i * BLOCK, j * BLOCK
            )
            dv += plgpu.dot(p.astype(do.dtype), do, trans_a=True)
            return dk + plgpu.dot(ds.astype(q.dtype), q, trans_a=True), dv

        return lax.fori_loop(j, high[b, j], block, grads)

    dk, dv = lax.fori_loop(0, G, head, (jnp.zeros(k.shape), jnp.zeros(v.shape)))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
