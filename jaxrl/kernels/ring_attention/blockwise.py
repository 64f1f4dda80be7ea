"""Block-wise ring attention: n steps, in each of which one device's keys meet all queries.

The online softmax of a device's queries continues from step to step. Loop bounds
are read from the segments, so invisible keys cost only their transfer. The backward pass sends keys
around again together with the sums of their gradients, which return home after n steps. The next
keys are transferred while the present ones are processed.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.blockwise import (
    QUERY_BLOCK,
    Mask,
    accumulate_gradients,
    accumulate_keys,
    from_query_rows,
    in_blocks,
    key_rows,
    query_rows,
)
from jaxrl.kernels.attention.online_softmax import BLOCK, Softmax, init_softmax, normalize
from jaxrl.kernels.attention_spec import SAVED_NAME, AttentionSpec
from jaxrl.kernels.ring_attention.ring import Ring, shard_ring
from jaxrl.kernels.sinks import add_sinks, row_sinks, sink_gradient
from jaxrl.kernels.visibility import Queries, Visibility, separate_segments


def ring_blockwise(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v; each device keeps its queries."""
    return shard_ring(
        _local_ring,
        q,
        k,
        v,
        spec=spec,
        segments=segments,
        window=window,
        visibility=visibility,
        sinks=sinks,
        masks=_masks_of_rows,
    )


def _masks_of_rows(ring: Ring, segments, window, visibility):
    """(queries of this place [2 B, c], chunk by chunk, visibility of whole rows)"""
    segments, visibility = ring.whole_rows((segments, visibility))
    visibility = visibility or separate_segments(segments)
    queries = ring.tokens_here(Queries.of(segments, visibility, window))
    return jax.tree.map(lambda a: a.reshape(-1, ring.chunk), queries), visibility


def _local_ring(ring: Ring, q, k, v, sinks, queries: Queries, visibility: Visibility):
    B, N, H = q.shape[0], *q.shape[2:]
    G = N // k.shape[2]
    block = min(QUERY_BLOCK, ring.chunk + -ring.chunk % BLOCK)
    queries = in_blocks(queries, block, copies=G)
    keys = [_key_chunks(x) for x in (k, v)]
    q_rows = query_rows(q.reshape(2 * B, -1, N, H), G, block)
    sinks = row_sinks(sinks, N // G, block)
    rows = _ring(ring, q_rows, *keys, queries, visibility, sinks)
    out = from_query_rows(rows, 2 * B, G, block)
    return out[:, : ring.chunk].reshape(q.shape).astype(q.dtype)


def _key_chunks(k):
    """[B, 2 c, K, H] -> [2, B, K, c, H], with c padded to a multiple of 64.

    Chunks keep their dtype for the transfer; they are float32 only during computation.
    """
    B, T, K, H = k.shape
    rows = key_rows(k.reshape(2 * B, T // 2, K, H)).astype(k.dtype)
    return rows.reshape(B, 2, *rows.shape[1:]).swapaxes(0, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, q, k, v, queries: Queries, visibility: Visibility, sinks):
    """q [n, K, M, H], k and v [2, B, K, c, H] -> float32 [n, K, M, H]; visibility of whole rows

    Sinks are [K, M], or None.
    """
    return _ring_forward(ring, q, k, v, queries, visibility, sinks)[0]


def _ring_forward(ring: Ring, q, k, v, queries: Queries, visibility: Visibility, sinks):
    per_row = q.shape[0] // k.shape[1]

    def attend_to(step, keys, states: Softmax) -> Softmax:
        chunks = list(zip(*_chunks(keys), _masks(ring, step, queries, visibility), strict=True))

        def query_block(i):
            state = jax.tree.map(lambda a: a[i], states)
            for k, v, mask in chunks:
                state = accumulate_keys(ring.spec, state, q[i], k, v, i // per_row, mask, i)
            return state

        return lax.map(query_block, jnp.arange(q.shape[0]))

    def step(s, carry):
        keys, states = carry
        return ring.pass_on(keys), attend_to(s, keys, states)

    states = init_softmax(q.shape[:3], v.shape[-1])
    keys, states = lax.fori_loop(0, ring.size - 1, step, ((k, v), states))
    out, norm = add_sinks(*normalize(attend_to(ring.size - 1, keys, states)), sinks)
    out, norm = checkpoint_name((out, norm), SAVED_NAME)
    return out, (q, k, v, queries, visibility, sinks, out, norm)


def _ring_backward(ring: Ring, saved, d_out):
    q, k, v, queries, visibility, sinks, out, norm = saved
    per_row = q.shape[0] // k.shape[1]
    delta = jnp.sum(out * d_out, axis=-1)

    def attend_to(step, keys, dq, key_grads):
        chunks = list(zip(*_chunks(keys), _masks(ring, step, queries, visibility), strict=True))

        def query_block(key_grads, i):
            dq_i, rows, added = dq[i], (q[i], d_out[i], norm[i], delta[i]), []
            for (k, v, mask), (dk, dv) in zip(chunks, key_grads, strict=True):
                some = dq_i, dk, dv
                dq_i, *some = accumulate_gradients(
                    ring.spec, some, rows, k, v, i // per_row, mask, i
                )
                added.append(tuple(some))
            return added, dq_i

        return lax.scan(query_block, key_grads, jnp.arange(q.shape[0]))

    def step(s, carry):
        keys, dq, key_grads = carry
        key_grads, dq = attend_to(s, keys, dq, key_grads)
        return ring.pass_on(keys), dq, ring.pass_on(key_grads)

    zeros = tuple(jnp.zeros(x.shape[1:], jnp.float32) for x in (k, v))
    carry = (k, v), jnp.zeros_like(q), [zeros] * 2
    keys, dq, key_grads = lax.fori_loop(0, ring.size - 1, step, carry)
    key_grads, dq = attend_to(ring.size - 1, keys, dq, key_grads)
    dk, dv = (jnp.stack(chunks) for chunks in zip(*ring.pass_on(key_grads), strict=True))
    d_sinks = sink_gradient(sinks, norm, out, d_out)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, d_sinks


_ring.defvjp(_ring_forward, _ring_backward)


def _chunks(keys) -> tuple[list, list]:
    """(keys of both chunks, values of both chunks), float32 [B, K, c, H]."""
    k, v = ([x[i].astype(jnp.float32) for i in range(2)] for x in keys)
    return k, v


def _masks(ring: Ring, step, queries: Queries, visibility: Visibility) -> list[Mask]:
    """The visible parts of both chunks of keys that are here after `step` steps."""

    def keys(base) -> Visibility:
        cut = functools.partial(
            lax.dynamic_slice_in_dim, start_index=base, slice_size=ring.chunk, axis=1
        )
        return jax.tree.map(cut, visibility)

    return [Mask.of(queries, keys(base), base) for base in ring.bases(step)]
