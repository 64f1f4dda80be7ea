"""Packed attention on NVIDIA GPUs: Pallas kernels in Triton, forward and backward.

A program has a block of queries and visits the key blocks that one of them can see
(triton_masks.py). The last block of a row, which as a rule sees most, starts first. In the backward
pass, another one has a block of keys and visits the query blocks that can see it, over some or all
heads that share its kv head (`heads_together`). `own_block` (limits.py) is the size of the former,
BLOCK that of the visited ones. Forward and backward follow https://arxiv.org/abs/2307.08691,
algorithms 1 and 2.
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

from jaxrl.kernels.attention.limits import BLOCK, own_block, unsupported_by_triton
from jaxrl.kernels.attention.online_softmax import MASKED, pad_axis
from jaxrl.kernels.attention.triton_masks import RangeMask, TreeMask, TritonMask
from jaxrl.kernels.attention_spec import SAVED_NAME, AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.shard_attention import shard_attention
from jaxrl.kernels.sinks import add_sinks, sink_gradient
from jaxrl.kernels.visibility import Visibility

# Programs of the gradients of keys from which no more are made: about 8 for each core of a large
# GPU, so that those with much work are not alone at the end.
ENOUGH_PROGRAMS = 1024


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Static parameters of the kernels; `interpret` emulates them with XLA."""

    spec: AttentionSpec
    interpret: bool
    block: int | None = None  # tokens of a program's own block; None = by GPU

    def own(self, q: jax.Array, n_tokens: int) -> int:
        """Tokens of a program's own block, of a row of `n_tokens`."""
        return self.block or own_block(q, n_tokens)

    def scores(self, products, visible):
        """Scores from products of queries and keys; MASKED if invisible."""
        return jnp.where(visible, self.spec.scores(products), MASKED)

    def gradients(self, products, d_weights, norm, delta, visible):
        """(softmax weights, gradients with respect to the products of queries and keys)."""
        scores = self.scores(products, visible)
        p = jnp.exp(scores - norm)
        ds = p * (d_weights - delta) * self.spec.scale
        if self.spec.softcap is not None:
            ds *= jnp.where(p > 0, 1.0 - (scores / self.spec.softcap) ** 2, 0.0)
        return p, ds

    def call(self, kernel, name: str, own: int, **options):
        return pl.pallas_call(
            functools.partial(kernel, self),
            name=name,
            interpret=self.interpret,
            compiler_params=plgpu.CompilerParams(num_warps=own // 16, num_stages=2),
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
    sinks: Float[Array, "N"] | None = None,
    interpret: bool = False,
    block: int | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v on each device's rows and heads.

    `interpret` emulates the kernels with XLA on any backend, with programs of `block` tokens, a
    multiple of 64 that divides the rows; None = by GPU. Raises NotImplementedError without a GPU
    and for head widths that are not a power of two.
    """
    check_triton(q, interpret)
    return shard_attention(
        functools.partial(_local_attention, Kernels(spec, interpret, block)),
        q,
        k,
        v,
        segments=segments,
        window=window,
        visibility=visibility,
        sinks=sinks,
        rules=spec.rules,
    )


def _local_attention(kernels: Kernels, q, k, v, segments, window, visibility, sinks):
    T = q.shape[1]
    if visibility is None:
        mask = RangeMask.of(segments, window)
    else:
        mask = TreeMask.of(segments, window, visibility)
    sinks = None if sinks is None else sinks[:, None]
    out = _flash(kernels, *(pad_axis(x, 1, BLOCK) for x in (q, k, v)), mask, sinks)
    return jnp.where(segments[:, :, None, None] > 0, out[:, :T], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(kernels: Kernels, q, k, v, mask: TritonMask, sinks):
    return _with_sinks(forward(kernels, q, k, v, mask), sinks)[0]


def _flash_forward(kernels: Kernels, q, k, v, mask: TritonMask, sinks):
    means = _with_sinks(forward(kernels, q, k, v, mask), sinks)
    out, norm = checkpoint_name(means, SAVED_NAME)
    return out, (q, k, v, out, norm, mask, sinks)


def _flash_backward(kernels: Kernels, saved, do):
    q, k, v, out, norm, mask, sinks = saved
    d_sinks = sink_gradient(sinks, norm, out.swapaxes(1, 2), do.swapaxes(1, 2))
    return *backward(kernels, q, k, v, out, norm, do, mask), None, d_sinks


def _with_sinks(means: tuple[jax.Array, jax.Array], sinks) -> tuple[jax.Array, jax.Array]:
    """The results of `forward` with sinks [N, 1], or None."""
    if sinks is None:
        return means
    out, norm = add_sinks(means[0].swapaxes(1, 2), means[1], sinks)
    return out.swapaxes(1, 2), norm


_flash.defvjp(_flash_forward, _flash_backward)


def forward(kernels: Kernels, q, k, v, mask: TritonMask) -> tuple[jax.Array, jax.Array]:
    """(mean [B, T, N, H], log Σ exp(score) [B, N, T]) of queries over the keys they see.

    q [B, T, N, H], k and v [B, S, K, H]; BLOCK divides T and S. Without visible keys the log is at
    most MASKED and the mean finite.
    """
    B, T, N, _ = q.shape
    own = kernels.own(q, T)
    by_block, keys, numbers, of_queries, of_keys = _specs(q, k, own)
    out, norm = kernels.call(
        _forward_kernel,
        "packed_attention_fwd",
        own,
        grid=(T // own, N, B),
        in_specs=[
            (pl.no_block_spec, pl.no_block_spec), by_block, keys, keys,
            mask.specs(of_queries, of_keys),
        ],
        out_specs=[by_block, numbers],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
    )(mask.key_blocks(own), q, k, v, mask)  # fmt: skip
    return out, norm


def backward(kernels: Kernels, q, k, v, out, norm, do, mask: TritonMask) -> tuple[jax.Array, ...]:
    """The contribution of these keys to the gradients (dq, dk, dv) of `out`.

    `norm` [B, N, T] is the log of the denominator with which `out` was computed; there may have
    been further keys.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    delta = jnp.einsum("BTNH,BTNH->BNT", out.astype(jnp.float32), do.astype(jnp.float32))
    own = kernels.own(q, T)
    by_block, keys, numbers, of_queries, of_keys = _specs(q, k, own)
    blocks = pl.no_block_spec, pl.no_block_spec
    dq = kernels.call(
        _dq_kernel,
        "packed_attention_dq",
        own,
        grid=(T // own, N, B),
        in_specs=[
            blocks, by_block, keys, keys, by_block, numbers, numbers,
            mask.specs(of_queries, of_keys),
        ],
        out_specs=by_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(mask.key_blocks(own), q, k, v, do, norm, delta, mask)  # fmt: skip

    own = kernels.own(q, S)
    G = heads_together(N // K, S // own * K * B)
    parts = N // K // G  # programs per block of keys, which sum over G heads each
    queries = pl.BlockSpec((None, T, G, H), lambda j, h, b: (b, 0, h, 0))
    per_head = pl.BlockSpec((None, G, T), lambda j, h, b: (b, h, 0))
    key_block = pl.BlockSpec((None, own, None, H), lambda j, h, b: (b, j, lax.div(h, parts), 0))
    part = pl.BlockSpec((None, own, None, H), lambda j, h, b: (b, j, h, 0))
    all_queries = pl.BlockSpec((None, T), lambda j, h, b: (b, 0))
    own_keys = pl.BlockSpec((None, own), lambda j, h, b: (b, j))
    sums = jax.ShapeDtypeStruct((B, S, N // G, H), k.dtype if parts == 1 else jnp.float32)
    grads = kernels.call(
        _dkv_kernel,
        "packed_attention_dkv",
        own,
        grid=(S // own, N // G, B),
        in_specs=[
            blocks, queries, key_block, key_block, queries, per_head, per_head,
            mask.specs(all_queries, own_keys),
        ],
        out_specs=[part, part],
        out_shape=[sums, sums],
    )(mask.query_blocks(S // own, own), q, k, v, do, norm, delta, mask)  # fmt: skip
    dk, dv = (jnp.sum(x.reshape(B, S, K, parts, H), axis=3).astype(k.dtype) for x in grads)
    return dq, dk, dv


def heads_together(n_heads: int, n_programs: int) -> int:
    """Query heads, of `n_heads` with one kv head, whose gradients of keys one program sums.

    All, if the kernel then has enough programs (`n_programs`). Else fewer: the programs of the
    first keys of long segments, which most queries see, would run alone at the end. The sums of
    several programs are float32 arrays in memory, added in a fixed order.
    """
    divisors = [g for g in range(n_heads, 0, -1) if n_heads % g == 0]
    return next((g for g in divisors if n_heads // g * n_programs >= ENOUGH_PROGRAMS), 1)


def _specs(q: jax.Array, k: jax.Array, own: int) -> tuple[pl.BlockSpec, ...]:
    """Block specs of `own` queries, keys, numbers per head, per query of the block, and per key.

    The grid is (query block from the last to the first, head, row).
    """
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    last = T // own - 1
    return (
        pl.BlockSpec((None, own, None, H), lambda i, n, b: (b, last - i, n, 0)),
        pl.BlockSpec((None, S, None, H), lambda i, n, b: (b, 0, lax.div(n, N // K), 0)),
        pl.BlockSpec((None, None, own), lambda i, n, b: (b, n, last - i)),
        pl.BlockSpec((None, own), lambda i, n, b: (b, last - i)),
        pl.BlockSpec((None, S), lambda i, n, b: (b, 0)),
    )


def _query_block():
    """The query block of a program (`_specs`)."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


def _places(block, size: int = BLOCK):
    return block * size + jnp.arange(size)


def _in_rows(numbers):
    return jax.tree.map(lambda a: a[:, None], numbers)


def _in_columns(numbers):
    return jax.tree.map(lambda a: a[None], numbers)


def _forward_kernel(
    kernels: Kernels, key_blocks, q_ref, k_ref, v_ref, mask: TritonMask, out_ref, norm_ref
):
    i, b = _query_block(), pl.program_id(2)
    q = q_ref[...]
    queries = _in_rows((_places(i, len(q)), mask.queries()))
    begin, end, key_block = mask.visits(key_blocks, b, i)

    def block(visit, state):
        max_score, denominator, numerator = state
        j = key_block(visit)
        at = pl.ds(j * BLOCK, BLOCK)
        visible = mask.visible(*queries, *_in_columns((_places(j), mask.keys(at))))
        scores = kernels.scores(plgpu.dot(q, k_ref[at, :], trans_b=True), visible)
        new_max = jnp.maximum(max_score, jnp.max(scores, axis=1))
        weights, correction = jnp.exp(scores - new_max[:, None]), jnp.exp(max_score - new_max)
        v = v_ref[at, :]
        numerator = numerator * correction[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return new_max, denominator * correction + jnp.sum(weights, axis=1), numerator

    empty = jnp.full(len(q), MASKED), jnp.zeros(len(q)), jnp.zeros(q.shape)
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
    mask: TritonMask,
    dq_ref,
):
    i, b = _query_block(), pl.program_id(2)
    q, do = q_ref[...], do_ref[...]
    norm, delta = _in_rows((norm_ref[...], delta_ref[...]))
    queries = _in_rows((_places(i, len(q)), mask.queries()))
    begin, end, key_block = mask.visits(key_blocks, b, i)

    def block(visit, dq):
        j = key_block(visit)
        at = pl.ds(j * BLOCK, BLOCK)
        k = k_ref[at, :]
        visible = mask.visible(*queries, *_in_columns((_places(j), mask.keys(at))))
        products = plgpu.dot(q, k, trans_b=True)
        d_weights = plgpu.dot(do, v_ref[at, :], trans_b=True)
        _, ds = kernels.gradients(products, d_weights, norm, delta, visible)
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
    mask: TritonMask,
    dk_ref,
    dv_ref,
):
    """Scores have keys in rows, so that no block of them is transposed."""
    j, b = pl.program_id(0), pl.program_id(2)
    k, v = k_ref[...], v_ref[...]
    keys = _in_rows((_places(j, len(k)), mask.keys()))
    begin, end = query_blocks
    G = q_ref.shape[1]

    def head(g, grads):
        def block(i, grads):
            dk, dv = grads
            at = pl.ds(i * BLOCK, BLOCK)
            q, do = q_ref[at, g, :], do_ref[at, g, :]
            visible = mask.visible(*_in_columns((_places(i), mask.queries(at))), *keys)
            products = plgpu.dot(k, q, trans_b=True)
            d_weights = plgpu.dot(v, do, trans_b=True)
            norm, delta = _in_columns((norm_ref[g, at], delta_ref[g, at]))
            p, ds = kernels.gradients(products, d_weights, norm, delta, visible)
            dv += plgpu.dot(p.astype(do.dtype), do)
            return dk + plgpu.dot(ds.astype(q.dtype), q), dv

        return lax.fori_loop(begin[b, j], end[b, j], block, grads)

    dk, dv = lax.fori_loop(0, G, head, (jnp.zeros(k.shape), jnp.zeros(v.shape)))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
