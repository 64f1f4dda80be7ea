"""Reference packed attention: the full [T, T] score matrix in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.online_softmax import MASKED
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.sinks import softmax_with_sinks
from jaxrl.kernels.visibility import Visibility, oldest_position, separate_segments, visible_pairs


def attention_reference(
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
    """softmax(cap(q kᵀ * scale)) v over each query's visible keys; zeros at padding (segment 0)."""
    rules = spec.rules
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = rules.spec("batch", None, "kv_heads", None, None)
    qg = jnp.reshape(q, (B, T, K, N // K, H), out_sharding=grouped)
    by_head = rules.spec("batch", "kv_heads", None, None, None)
    scores = jnp.einsum(
        "BTKGH,BSKH->BKGTS", qg.astype(jnp.float32), k.astype(jnp.float32), out_sharding=by_head
    )
    scores = spec.scores(scores)
    rows = visibility or separate_segments(segments)
    oldest, place = oldest_position(rows.positions, window), jnp.arange(T)[None]
    visible = visible_pairs(place, oldest, place, rows.until, rows.positions, rows.ahead)
    probs = softmax_with_sinks(jnp.where(visible[:, None, None], scores, MASKED), sinks)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", probs, v.astype(jnp.float32), out_sharding=grouped)
    out = jnp.where(segments[:, :, None, None, None] > 0, out, 0.0)
    heads = rules.spec("batch", None, "heads", None)
    return jnp.reshape(out, (B, T, N, H), out_sharding=heads).astype(q.dtype)
