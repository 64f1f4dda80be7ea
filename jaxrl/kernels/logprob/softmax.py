"""Sums of a softmax over the vocabulary, which devices may share."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.kernels.attention.online_softmax import MASKED
from jaxrl.kernels.bits import row_sum

# [c] each: max l, Σ exp(l - max l), Σ exp(l - max l) (l - max l)
Moments = tuple[jax.Array, jax.Array, jax.Array]


def vocab_sum(values: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Σ over the vocabulary [c, v], whose shards are on the devices of `axes`."""
    total = row_sum(values)
    return lax.psum(total, axes) if axes else total


def softmax_parts(
    logits: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(max l [c], Σ exp(l - max l) [c], exp(l - max l) [c, v]) of logits l [c, v]."""
    top = jnp.max(logits, axis=-1)
    if axes:
        top = lax.pmax(top, axes)
    e = jnp.exp(logits - top[:, None])
    return top, vocab_sum(e, axes), e


def softmax_moments(logits: jax.Array, axes: tuple[str, ...]) -> Moments:
    """The moments of logits [c, v] in one pass over them.

    The online softmax of https://arxiv.org/abs/1805.02867, algorithm 3, with one more sum.
    """
    ones, zeros = jnp.ones_like(logits), jnp.zeros_like(logits)
    start = jnp.float32(MASKED), jnp.float32(0), jnp.float32(0)
    top, total, weighted = lax.reduce((logits, ones, zeros), start, _join, (1,))
    if not axes:
        return top, total, weighted
    shared = lax.pmax(top, axes)
    _, total, weighted = _rescale((top, total, weighted), shared)
    return shared, lax.psum(total, axes), lax.psum(weighted, axes)


def _join(a: Moments, b: Moments) -> Moments:
    """The moments of two parts together."""
    top = jnp.maximum(a[0], b[0])
    (_, total, weighted), other = _rescale(a, top), _rescale(b, top)
    return top, total + other[1], weighted + other[2]


def _rescale(moments: Moments, top: jax.Array) -> Moments:
    """The moments relative to `top` in place of their maximum."""
    old, total, weighted = moments
    shift = old - top
    factor = jnp.exp(shift)
    return top, total * factor, (weighted + shift * total) * factor
