"""The k most likely ids of every token, without a [tokens, vocab] array."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl.kernels.logprob.chunked import Head, Kept, gather_weight, vocab_start
from jaxrl.kernels.logprob.softmax import softmax_parts


def chunked_top_k(
    head: Head, k: int, xs, ws, keep
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """(ids, logp) of the k largest logits, the largest first; zeros for masked tokens.

    Arguments as in `chunked_logprob`. Ties go to the smaller id.
    """
    rows, tokens, x_specs, w_specs, *_ = head.specs(len(xs), 0)
    local = jax.shard_map(
        functools.partial(_local_top_k, head, k),
        in_specs=(x_specs, w_specs, tokens),
        out_specs=(rows, rows),
        check_vma=False,
    )
    ids, logp = local(xs, ws, keep)
    return ids, logp


def _local_top_k(head: Head, k: int, xs, ws, keep):
    n = keep.size
    c = max(math.ceil(n / math.ceil(n / head.chunk)), 2)
    kept = Kept.of(keep, c)
    rows = [kept.rows(x) for x in xs]
    ws = (gather_weight(head, ws[0]), *ws[1:])

    def chunk(i, carry):
        logits = head.logits([lax.dynamic_slice_in_dim(x, i * c, c) for x in rows], ws)
        top, total, _ = softmax_parts(logits, head.vocab_axes)
        values, ids = _largest(head, logits, k)
        found = ids, values - (top + jnp.log(total))[:, None]
        pairs = zip(carry, found, strict=True)
        return tuple(lax.dynamic_update_slice(old, new, (i * c, 0)) for old, new in pairs)

    start = tuple(jnp.zeros((len(kept.order), k), dtype) for dtype in (jnp.int32, jnp.float32))
    found = lax.fori_loop(0, -(-kept.count // c), chunk, start)
    ids, logp = (kept.back(a, keep) for a in found)
    return ids, logp


def _largest(head: Head, logits, k: int):
    """(values, ids) of the k largest logits [c, v] over all shards of the vocabulary."""
    axes, v = head.vocab_axes, logits.shape[1]
    if not axes:
        return lax.top_k(logits, k)
    values, ids = lax.top_k(logits, min(k, v))
    both = values, ids + vocab_start(head, v)
    values, ids = (lax.all_gather(a, axes, axis=1, tiled=True) for a in both)
    values, places = lax.top_k(values, k)
    return values, jnp.take_along_axis(ids, places, axis=1)
