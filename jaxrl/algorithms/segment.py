"""Sums and maxima over the segments of packed rows, broadcast to every token of the segment.

A segment is a run of equal, positive `segments`; 0 is padding. Rows may be sharded over any axes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def segment_sum(x: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Σ x over the token's segment, at each of its tokens; 0 at padding.

    Two scans of log2(T) shifts. The forward scan adds to each token the partial sum d tokens before
    it in the segment, for d = 1, 2, 4, ..., so that the last token has the total. The order of
    additions depends on the segment alone, so packing does not change a bit of the result. The
    backward scan copies the total to the other tokens.
    """

    def total(x: jax.Array, segments: jax.Array) -> jax.Array:
        x = jnp.where(segments > 0, x, 0.0)
        ends = jnp.pad(segments[:, 1:], ((0, 0), (0, 1))) != segments
        last = jnp.where(ends, _running(jnp.add, x, segments, forward=True), 0.0)
        return _running(jnp.add, last, segments, forward=False)

    return _on_whole_rows(total, x, segments)


# Every token of a segment contributes to the sum at every other: the function is its own transpose.
segment_sum.defvjp(
    lambda x, segments: (segment_sum(x, segments), segments),
    lambda segments, grad: (segment_sum(grad, segments), None),
)


def segment_mean(
    x: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Mean of x over the unmasked tokens of the token's segment; 0 if all are masked."""
    count = segment_sum(mask, segments)
    return segment_sum(jnp.where(mask > 0, x, 0.0) * mask, segments) / jnp.maximum(count, 1.0)


def segment_max(
    x: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Maximum of x over the unmasked tokens of the token's segment; -inf if all are masked."""

    def largest(x: jax.Array, segments: jax.Array) -> jax.Array:
        before = _running(jnp.maximum, x, segments, forward=True)
        return jnp.maximum(before, _running(jnp.maximum, x, segments, forward=False))

    return _on_whole_rows(largest, jnp.where(mask > 0, x, -jnp.inf), segments)


def _on_whole_rows(
    function: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, segments: jax.Array
) -> jax.Array:
    """function(x, segments) on rows that are not sharded over time, sharded as x again.

    A shift along T would cross devices.
    """
    spec = jax.typeof(x).sharding.spec
    if len(spec) < 2 or spec[1] is None:
        return function(x, segments)
    x, segments = jax.reshard((x, segments), jax.P(spec[0], None))
    return jax.reshard(function(x, segments), spec)


def _running(
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    segments: jax.Array,
    *,
    forward: bool,
) -> jax.Array:
    """Inclusive running sum (or maximum) of x in each segment, from its start (or from its end).

    A `fori_loop`, not an unrolled chain: XLA would fuse the chain into one kernel that recomputes
    each level for every level after it.
    """
    position = jnp.arange(x.shape[1])

    def level(i, x):
        shift = jnp.left_shift(1, i) if forward else -jnp.left_shift(1, i)
        inside = (position >= shift) & (position < x.shape[1] + shift)
        same = jnp.roll(segments, shift, axis=1) == segments
        return jnp.where(inside & same, combine(x, jnp.roll(x, shift, axis=1)), x)

    return jax.lax.fori_loop(0, max(x.shape[1] - 1, 0).bit_length(), level, x)
