"""Attention sinks: one more logit of each head in the softmax, which has no value.

A kernel returns the mean over the keys and the log l of its softmax denominator. With a sink s the
denominator is exp(t) = exp(l) + exp(s), and the mean is multiplied by exp(l - t). So sinks are
added once, after all keys, whichever kernel computed the mean and in how many parts. The backward
pass of every kernel takes t in place of l, and the gradient of a sink is -Σ exp(s - t) out d_out.

Sinks learned with the model: gpt-oss, https://arxiv.org/abs/2508.10925, section 2.2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def add_sinks(
    out: Float[Array, "*A H"], norm: Float[Array, "*A"], sinks: Float[Array, "..."] | None
) -> tuple[jax.Array, jax.Array]:
    """(mean, log of its softmax denominator) with sinks, float32, which broadcast to `norm`.

    Queries without visible keys, whose norm is at most MASKED, have a mean of zero.
    """
    if sinks is None:
        return out, norm
    total = jnp.logaddexp(norm, sinks)
    share = jnp.exp(norm - total)
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype), total


def sink_gradient(
    sinks: Float[Array, "..."] | None,
    norm: Float[Array, "*A"],
    out: Float[Array, "*A H"],
    d_out: Float[Array, "*A H"],
) -> jax.Array | None:
    """The gradient of the sinks; `out` and `norm` are those with sinks."""
    if sinks is None:
        return None
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    to_norm, pull_back = jax.vjp(lambda s: jnp.broadcast_to(s, norm.shape), sinks)
    return pull_back(-jnp.exp(to_norm - norm) * delta)[0]


def row_sinks(sinks: Float[Array, "N"] | None, n_kv_heads: int, n_tokens: int) -> jax.Array | None:
    """[K, n_tokens * G]: the sinks of query rows, tokens x heads that share a kv head."""
    return None if sinks is None else jnp.tile(sinks.reshape(n_kv_heads, -1), (1, n_tokens))


def softmax_with_sinks(
    scores: Float[Array, "B K G T S"], sinks: Float[Array, "N"] | None
) -> Float[Array, "B K G T S"]:
    """softmax over keys and the sink of the head, without the weight of the sink: the reference."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    B, K, G, T, S = scores.shape
    spec = jax.typeof(scores).sharding.spec
    column = jnp.reshape(sinks, (K, G), out_sharding=jax.P(*spec[1:3]))
    column = jax.lax.broadcast_in_dim(column, (B, K, G, T, 1), (1, 2), out_sharding=spec)
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :S]
