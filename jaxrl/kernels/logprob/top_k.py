"""The k most likely ids of every token, without a [tokens, vocab] array."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl.kernels.logprob.chunk_map import chunk_map
from jaxrl.kernels.logprob.chunked import Head, vocab_start
from jaxrl.kernels.logprob.softmax import softmax_parts


def chunked_top_k(
    head: Head, k: int, xs, ws, keep
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """(ids, logp) of the k largest logits, the largest first; zeros for masked tokens.

    Arguments as in `chunked_logprob`. Ties go to the smaller id.
    """

    def largest(logits):
        top, total, _ = softmax_parts(logits, head.vocab_axes)
        values, ids = _largest(head, logits, k)
        return ids, values - (top + jnp.log(total))[:, None]

    ids, logp = chunk_map(head, largest, (((k,), jnp.int32), ((k,), jnp.float32)), xs, ws, keep)
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
