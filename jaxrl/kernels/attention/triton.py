"""Packed attention on NVIDIA GPUs: Pallas kernels in Triton, forward and backward.

A query block visits the key blocks that one of its queries can see (triton_masks.py). In the
backward pass, a key block visits the query blocks that can see it, over all heads that share its kv
head. Forward and backward follow https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
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

from jaxrl.kernels.attention.blocks import MASKED, pad_axis
from jaxrl.kernels.attention.limits import unsupported_by_triton
from jaxrl.kernels.attention.triton_masks import BLOCK, Mask, RangeMask, TreeMask
from jaxrl.kernels.attention_spec import SAVED_NAME, AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.shard_attention import shard_attention
from jaxrl.kernels.visibility import Visibility


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


def check_triton(q: jax.Array, interpret: bool) -> None:
    """Raises NotImplementedError without a GPU, and for head widths that are no power of two."""
    if not interpret:
        check_platform("config.model.attention", "triton", "gpu")
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
    check_triton(q, interpret)
    return shard_attention(
        functools.partial(_local_attention, Kernels(spec, interpret)),
        q,
        k,
        v,
        segments=segments,
        window=window,
        visibility=visibility,
        rules=spec.rules,
    )


def _local_attention(kernels: Kernels, q, k, v, segments, window, visibility):
    T = q.shape[1]
    if visibility is None:
        mask = RangeMask.of(segments, window)
    else:
        mask = TreeMask.of(segments, window, visibility)
    out = _flash(kernels, *(pad_axis(x, 1, BLOCK) for x in (q, k, v)), mask)
    return jnp.where(segments[:, :, None, None] > 0, out[:, :T], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(kernels: Kernels, q, k, v, mask: Mask):
    return forward(kernels, q, k, v, mask)[0]


def _flash_forward(kernels: Kernels, q, k, v, mask: Mask):
    out, norm = checkpoint_name(forward(kernels, q, k, v, mask), SAVED_NAME)
    return out, (q, k, v, out, norm, mask)


def _flash_backward(kernels: Kernels, saved, do):
    q, k, v, out, norm, mask = saved
    return *backward(kernels, q, k, v, out, norm, do, mask), None


_flash.defvjp(_flash_forward, _flash_backward)


def forward(kernels: Kernels, q, k, v, mask: Mask) -> tuple[jax.Array, jax.Array]:
    """(mean [B, T, N, H], log Σ exp(score) [B, N, T]) of queries over the keys they see.

    q [B, T, N, H], k and v [B, S, K, H]; BLOCK divides T and S. Without visible keys the log is at
    most MASKED and the mean finite.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    by_block, keys, numbers, of_queries, of_keys = _specs(S, H, N // K)
    out, norm = kernels.call(
        _forward_kernel,
        "packed_attention_fwd",
        grid=(T // BLOCK, N, B),
        in_specs=[
            (pl.no_block_spec, pl.no_block_spec), by_block, keys, keys,
            mask.specs(of_queries, of_keys),
        ],
        out_specs=[by_block, numbers],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
    )(mask.key_blocks(), q, k, v, mask)  # fmt: skip
    return out, norm


def backward(kernels: Kernels, q, k, v, out, norm, do, mask: Mask) -> tuple[jax.Array, ...]:
    """The contribution of these keys to the gradients (dq, dk, dv) of `out`.

    `norm` [B, N, T] is the log of the denominator with which `out` was computed; there may have
    been further keys.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    G = N // K
    delta = jnp.einsum("BTNH,BTNH->BNT", out.astype(jnp.float32), do.astype(jnp.float32))
    by_block, keys, numbers, of_queries, of_keys = _specs(S, H, G)
    blocks = pl.no_block_spec, pl.no_block_spec
    dq = kernels.call(
        _dq_kernel,
        "packed_attention_dq",
        grid=(T // BLOCK, N, B),
        in_specs=[
            blocks, by_block, keys, keys, by_block, numbers, numbers,
            mask.specs(of_queries, of_keys),
        ],
        out_specs=by_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(mask.key_blocks(), q, k, v, do, norm, delta, mask)  # fmt: skip

    queries = pl.BlockSpec((None, T, G, H), lambda j, h, b: (b, 0, h, 0))
    per_head = pl.BlockSpec((None, G, T), lambda j, h, b: (b, h, 0))
    key_block = pl.BlockSpec((None, BLOCK, None, H), lambda j, h, b: (b, j, h, 0))
    all_queries = pl.BlockSpec((None, T), lambda j, h, b: (b, 0))
    own_keys = pl.BlockSpec((None, BLOCK), lambda j, h, b: (b, j))
    dk, dv = kernels.call(
        _dkv_kernel,
        "packed_attention_dkv",
        grid=(S // BLOCK, K, B),
        in_specs=[
            blocks, queries, key_block, key_block, queries, per_head, per_head,
            mask.specs(all_queries, own_keys),
        ],
        out_specs=[key_block, key_block],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
    )(mask.query_blocks(S // BLOCK), q, k, v, do, norm, delta, mask)  # fmt: skip
    return dq, dk, dv


def _specs(S: int, H: int, G: int) -> tuple[pl.BlockSpec, ...]:
    """Block specs of queries, keys, numbers per head, per query of the block, and per key.

    The grid is (query block, head, row).
    """
    return (
        pl.BlockSpec((None, BLOCK, None, H), lambda i, n, b: (b, i, n, 0)),
        pl.BlockSpec((None, S, None, H), lambda i, n, b: (b, 0, lax.div(n, G), 0)),
        pl.BlockSpec((None, None, BLOCK), lambda i, n, b: (b, n, i)),
        pl.BlockSpec((None, BLOCK), lambda i, n, b: (b, i)),
        pl.BlockSpec((None, S), lambda i, n, b: (b, 0)),
    )


def _places(block):
    return block * BLOCK + jnp.arange(BLOCK)


def _forward_kernel(
    kernels: Kernels, key_blocks, q_ref, k_ref, v_ref, mask: Mask, out_ref, norm_ref
):
    i, b = pl.program_id(0), pl.program_id(2)
    q, queries = q_ref[...], mask.queries()
    begin, end, key_block = mask.visits(key_blocks, b, i)

    def block(visit, state):
        max_score, denominator, numerator = state
        j = key_block(visit)
        at = pl.ds(j * BLOCK, BLOCK)
        visible = mask.visible(_places(i), queries, _places(j), mask.keys(at))
        scores = kernels.scores(q, k_ref[at, :], visible)
        new_max = jnp.maximum(max_score, jnp.max(scores, axis=1))
        weights, correction = jnp.exp(scores - new_max[:, None]), jnp.exp(max_score - new_max)
        v = v_ref[at, :]
        numerator = numerator * correction[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return new_max, denominator * correction + jnp.sum(weights, axis=1), numerator

    empty = jnp.full(BLOCK, MASKED), jnp.zeros(BLOCK), jnp.zeros(q.shape)
    max_score, denominator, numerator = lax.fori_loop(begin, end, block, empty)
    denominator = jnp.maximum(denominator, jnp.finfo(jnp.float32).tiny)  # 0 if no block was visited
    out_ref[...] = (numerator / denominator[:, None]).astype(out_ref.dtype)
    norm_ref[...] = max_score + jnp.log(denominator)


def _dq_kernel(
    kernels: Kernels,
    key_blocks,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    norm_ref,
    delta_ref,
    mask: Mask,
    dq_ref,
):
    i, b = pl.program_id(0), pl.program_id(2)
    q, do, norm, delta = (ref[...] for ref in (q_ref, do_ref, norm_ref, delta_ref))
    queries = mask.queries()
    begin, end, key_block = mask.visits(key_blocks, b, i)

    def block(visit, dq):
        j = key_block(visit)
        at = pl.ds(j * BLOCK, BLOCK)
        k = k_ref[at, :]
        visible = mask.visible(_places(i), queries, _places(j), mask.keys(at))
        _, ds = kernels.gradients(q, k, v_ref[at, :], do, norm, delta, visible)
        return dq + plgpu.dot(ds.astype(k.dtype), k)

    dq = lax.fori_loop(begin, end, block, jnp.zeros(q.shape))
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _dkv_kernel(
    kernels: Kernels,
    query_blocks,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    norm_ref,
    delta_ref,
    mask: Mask,
    dk_ref,
    dv_ref,
):
    j, b = pl.program_id(0), pl.program_id(2)
    k, v, keys = k_ref[...], v_ref[...], mask.keys()
    begin, end = query_blocks
    G = q_ref.shape[1]

    def head(g, grads):
        def block(i, grads):
            dk, dv = grads
            at = pl.ds(i * BLOCK, BLOCK)
            q, do = q_ref[at, g, :], do_ref[at, g, :]
            visible = mask.visible(_places(i), mask.queries(at), _places(j), keys)
            p, ds = kernels.gradients(q, k, v, do, norm_ref[g, at], delta_ref[g, at], visible)
            dv += plgpu.dot(p.astype(do.dtype), do, trans_a=True)
            return dk + plgpu.dot(ds.astype(q.dtype), q, trans_a=True), dv

        return lax.fori_loop(begin[b, j], end[b, j], block, grads)

    dk, dv = lax.fori_loop(0, G, head, (jnp.zeros(k.shape), jnp.zeros(v.shape)))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
