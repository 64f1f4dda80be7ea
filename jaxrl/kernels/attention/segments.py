"""Attention without causal mask within the segments of packed rows, for patches of images.

It runs the blocks of blockwise.py on every backend, so no [T, T] scores exist. The kernels for GPU
and TPU skip the keys after a query, and towers run once per prompt: a kernel for them would save
little of a step.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.blockwise import QUERY_BLOCK, attend_blocks
from jaxrl.kernels.attention.online_softmax import BLOCK
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.shard_attention import shard_attention
from jaxrl.kernels.visibility import Queries, Visibility, separate_segments


def attention_in_segments(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v over all keys of the query's segment; zeros at padding.

    A segment is one run of equal numbers in its row, 0 is padding. Rows are sharded over the batch
    and heads, as in `attention`: one that is sharded over time is resharded.
    """
    inside = spec.rules.whole_rows()
    whole = inside.spec("batch", "time", "heads", None)
    attend = functools.partial(_local_attention, spec)
    out = shard_attention(
        attend,
        *(jax.reshard(x, whole) for x in (q, k, v)),
        segments=jax.reshard(segments, inside.spec("batch", "time")),
        window=0,
        visibility=None,
        sinks=None,
        rules=inside,
    )
    return jax.reshard(out, spec.rules.spec("batch", "time", "heads", None))


def _local_attention(spec: AttentionSpec, q, k, v, segments, window, visibility, sinks):
    T = q.shape[1]
    block = min(QUERY_BLOCK, T + -T % BLOCK)
    keys = separate_segments(segments)
    return attend_blocks(spec, block, q, k, v, last_queries(keys), keys, None)


def last_queries(keys: Visibility) -> Queries:
    """Every query in the place of the last token of its segment, which sees all of the segment."""
    return Queries(keys.until, jnp.zeros_like(keys.until))
