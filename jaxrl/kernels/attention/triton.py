"""Packed attention on NVIDIA GPUs: Pallas kernels in Triton, forward and backward.

The keys visible to a query are one range: in packed rows, from the first that segment and window
allow to its own position. Both ends never decrease from one query to the next. A query block visits
the key blocks from the first to the last that one of its queries can see. In the backward pass, a
key block visits the queries that can see it, over all heads that share its kv head. Forward and
backward follow https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
Scores, softmax and sums are float32; matrix products use the operands' dtype.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention import triton_prefixes
from jaxrl.kernels.attention.blocks import MASKED, pad_axis
from jaxrl.kernels.attention_spec import SAVED_NAME, AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.shard_attention import shard_attention
from jaxrl.kernels.visibility import Visibility, visible_range

BLOCK = 64  # tokens per query block and key block
MIN_ROWS = 16  # of a tensor-core matrix product


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Static parameters of the kernels; `interpret` emulates them with XLA."""

    spec: AttentionSpec
    interpret: bool

    def scores(self, q, k, first, last, at_k):
        """[queries, keys], of the key block that starts at `at_k`; MASKED if invisible."""
        scores = self.spec.scores(plgpu.dot(q, k, trans_b=True))
        key = at_k + jnp.arange(len(k))
        visible = (key[None] >= first[:, None]) & (key[None] <= last[:, None])
        return jnp.where(visible, scores, MASKED)

    def gradients(self, q, k, v, do, norm, delta, first, last, at_k):
        """(softmax weights, gradients with respect to q kᵀ)."""
        scores = self.scores(q, k, first, last, at_k)
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


def check_heads(q: jax.Array) -> None:
    """Raises NotImplementedError for head widths that are not a power of two."""
    if why := unsupported_by_triton(q):
        raise NotImplementedError(
            f"config.model.attention='triton' does not support {why}; set it to 'auto' or "
            "'blockwise'"
        )


def attention_triton(
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

    `interpret` emulates the kernels with XLA on any backend. Raises NotImplementedError without a
    GPU and for head widths that are not a power of two.
    """
    if not interpret:
        check_platform("config.model.attention", "triton", "gpu")
    check_heads(q)
    attend = functools.partial(_local_attention, Kernels(spec, interpret))
    if visibility is not None:
        kernels = triton_prefixes.Kernels(spec, interpret)
        attend = functools.partial(triton_prefixes.local_attention, kernels)
    return shard_attention(
        attend,
        q,
        k,
        v,
        segments=segments,
        window=window,
        visibility=visibility,
        rules=spec.rules,
    )


def _local_attention(kernels: Kernels, q, k, v, segments, window, _):
    T = q.shape[1]
    first, last = visible_range(segments, window)
    # Padding attends to itself: a softmax over no key is not finite.
    first = jnp.where(last >= 0, first, jnp.arange(T))
    first = jnp.pad(first, ((0, 0), (0, -T % BLOCK)), constant_values=T)
    last = jnp.broadcast_to(jnp.arange(first.shape[1]), first.shape)
    out = _flash(kernels, *(pad_axis(x, 1, BLOCK) for x in (q, k, v)), first, last)
    return jnp.where(segments[:, :, None, None] > 0, out[:, :T], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(kernels: Kernels, q, k, v, first, last):
    return forward(kernels, q, k, v, first, last)[0]


def _flash_forward(kernels: Kernels, q, k, v, first, last):
    out, norm = checkpoint_name(forward(kernels, q, k, v, first, last), SAVED_NAME)
    return out, (q, k, v, out, norm, first, last)


def _flash_backward(kernels: Kernels, saved, do):
    q, k, v, out, norm, first, last = saved
    return *backward(kernels, q, k, v, out, norm, do, first, last), None, None


_flash.defvjp(_flash_forward, _flash_backward)


def forward(kernels: Kernels, q, k, v, first, last) -> tuple[jax.Array, jax.Array]:
    """(mean [B, T, N, H], log Σ exp(score) [B, N, T]) of queries over their ranges of keys.

    q [B, T, N, H], k and v [B, S, K, H], first and last [B, T]; BLOCK divides T and S. A range is
    empty if first > last; its log is at most MASKED and its mean finite.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    by_block, keys, numbers, ends = _specs(S, H, N // K)
    out, norm = kernels.call(
        _forward_kernel,
        "packed_attention_fwd",
        grid=(T // BLOCK, N, B),
        in_specs=[pl.no_block_spec, pl.no_block_spec, by_block, keys, keys, ends, ends],
        out_specs=[by_block, numbers],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
    )(*_key_blocks(first, last), q, k, v, first, last)
    return out, norm


def backward(kernels: Kernels, q, k, v, out, norm, do, first, last) -> tuple[jax.Array, ...]:
    """The contribution of these keys to the gradients (dq, dk, dv) of `out`.

    `norm` [B, N, T] is the log of the denominator with which `out` was computed; there may have
    been further keys.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    G = N // K
    delta = jnp.einsum("BTNH,BTNH->BNT", out.astype(jnp.float32), do.astype(jnp.float32))
    low, high = _key_blocks(first, last)
    by_block, keys, numbers, ends = _specs(S, H, G)
    blocks = [pl.no_block_spec] * 2
    dq = kernels.call(
        _dq_kernel,
        "packed_attention_dq",
        grid=(T // BLOCK, N, B),
        in_specs=[*blocks, by_block, keys, keys, by_block, numbers, numbers, ends, ends],
        out_specs=by_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(low, high, q, k, v, do, norm, delta, first, last)

    # The query blocks that see key block j: neither end of their ranges ever decreases.
    j = jnp.arange(S // BLOCK)[:, None]
    begin = jnp.sum(high[:, None, :] <= j, axis=-1, dtype=jnp.int32)
    end = jnp.sum(low[:, None, :] <= j, axis=-1, dtype=jnp.int32)
    queries = pl.BlockSpec((None, T, G, H), lambda j, h, b: (b, 0, h, 0))
    per_head = pl.BlockSpec((None, G, T), lambda j, h, b: (b, h, 0))
    key_block = pl.BlockSpec((None, BLOCK, None, H), lambda j, h, b: (b, j, h, 0))
    dk, dv = kernels.call(
        _dkv_kernel,
        "packed_attention_dkv",
        grid=(S // BLOCK, K, B),
        in_specs=[
            *blocks, queries, key_block, key_block, queries, per_head, per_head,
            *[pl.BlockSpec((None, T), lambda j, h, b: (b, 0))] * 2,
        ],
        out_specs=[key_block, key_block],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
    )(begin, end, q, k, v, do, norm, delta, first, last)  # fmt: skip
    return dq, dk, dv


def _key_blocks(first: Int[Array, "B T"], last: Int[Array, "B T"]) -> tuple[jax.Array, jax.Array]:
    """First visible key block of each query block, and the one after the last; [B, n]."""
    low, high = (x.reshape(len(x), -1, BLOCK) for x in (first, last))
    return jnp.min(low, axis=-1) // BLOCK, jnp.max(high, axis=-1) // BLOCK + 1


def _specs(S: int, H: int, G: int) -> tuple[pl.BlockSpec, ...]:
    """Block specs of queries, keys, numbers and range ends, for grid (query block, head, row)."""
    return (
        pl.BlockSpec((None, BLOCK, None, H), lambda i, n, b: (b, i, n, 0)),
        pl.BlockSpec((None, S, None, H), lambda i, n, b: (b, 0, lax.div(n, G), 0)),
        pl.BlockSpec((None, None, BLOCK), lambda i, n, b: (b, n, i)),
        pl.BlockSpec((None, BLOCK), lambda i, n, b: (b, i)),
    )


def _forward_kernel(
    kernels: Kernels, low, high, q_ref, k_ref, v_ref, first_ref, last_ref, out_ref, norm_ref
):
    i, b = pl.program_id(0), pl.program_id(2)
    q, first, last = q_ref[...], first_ref[...], last_ref[...]

    def block(j, state):
        max_score, denominator, numerator = state
        at = pl.ds(j * BLOCK, BLOCK)
        scores = kernels.scores(q, k_ref[at, :], first, last, j * BLOCK)
        new_max = jnp.maximum(max_score, jnp.max(scores, axis=1))
        weights, correction = jnp.exp(scores - new_max[:, None]), jnp.exp(max_score - new_max)
        v = v_ref[at, :]
        numerator = numerator * correction[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return new_max, denominator * correction + jnp.sum(weights, axis=1), numerator

    empty = jnp.full(BLOCK, MASKED), jnp.zeros(BLOCK), jnp.zeros(q.shape)
    max_score, denominator, numerator = lax.fori_loop(low[b, i], high[b, i], block, empty)
    denominator = jnp.maximum(denominator, jnp.finfo(jnp.float32).tiny)  # 0 if no block was visited
    out_ref[...] = (numerator / denominator[:, None]).astype(out_ref.dtype)
    norm_ref[...] = max_score + jnp.log(denominator)


def _dq_kernel(
    kernels: Kernels,
    low,
    high,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    norm_ref,
    delta_ref,
    first_ref,
    last_ref,
    dq_ref,
):
    i, b = pl.program_id(0), pl.program_id(2)
    q, do, norm, delta, first, last = (
        ref[...] for ref in (q_ref, do_ref, norm_ref, delta_ref, first_ref, last_ref)
    )

    def block(j, dq):
        at = pl.ds(j * BLOCK, BLOCK)
        k = k_ref[at, :]
        _, ds = kernels.gradients(q, k, v_ref[at, :], do, norm, delta, first, last, j * BLOCK)
        return dq + plgpu.dot(ds.astype(k.dtype), k)

    dq = lax.fori_loop(low[b, i], high[b, i], block, jnp.zeros(q.shape))
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _dkv_kernel(
    kernels: Kernels,
    begin,
    end,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    norm_ref,
    delta_ref,
    first_ref,
    last_ref,
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
            of_queries = norm_ref[g, at], delta_ref[g, at], first_ref[at], last_ref[at]
            p, ds = kernels.gradients(q, k, v, do, *of_queries, j * BLOCK)
            dv += plgpu.dot(p.astype(do.dtype), do, trans_a=True)
            return dk + plgpu.dot(ds.astype(q.dtype), q, trans_a=True), dv

        return lax.fori_loop(begin[b, j], end[b, j], block, grads)

    dk, dv = lax.fori_loop(0, G, head, (jnp.zeros(k.shape), jnp.zeros(v.shape)))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
