"""Logprob and collision probability of every token, without a [tokens, vocab] array."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.kernels.logprob.chunk_map import chunk_map
from jaxrl.kernels.logprob.chunked import Head, pick
from jaxrl.kernels.logprob.softmax import softmax_parts, vocab_sum


def chunked_collision(
    head: Head, xs, ws, targets, keep
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log p(target), log Σ p²) over the vocabulary; zeros for masked tokens.

    Σ p² is the probability that two samples are the same id. Arguments as in `chunked_logprob`.
    """

    def both(logits, y):
        top, total, e = softmax_parts(logits, head.vocab_axes)
        logp = pick(head, logits, y) - top - jnp.log(total)
        return logp, jnp.log(vocab_sum(e * e, head.vocab_axes)) - 2.0 * jnp.log(total)

    shapes = (((), jnp.float32), ((), jnp.float32))
    logp, collision = chunk_map(head, both, shapes, xs, ws, keep, targets)
    return logp, collision
