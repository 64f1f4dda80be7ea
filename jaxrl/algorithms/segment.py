"""Sums over the sequences of packed rows, given back to every token of theirs.

A segment is a run of equal, positive `segments`; 0 is padding. Rows may lie on any batch axes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def segment_sum(x: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Σ x over the token's segment, at each of its tokens; 0 at padding.

    Two scans of log2(T) shifts. Forward a token adds what lies d before it in its segment, for
    d = 1, 2, 4, ...: the last one has it all, added in an order that depends on nothing but the
    segment itself, so that packing does not change a bit. Backward the others take it from there.
    """
    spec = jax.typeof(x).sharding.spec
    cut = len(spec) > 1 and spec[1] is not None
    if cut:  # a shift along T would cross devices
        x, segments = jax.reshard((x, segments), jax.P(spec[0], None))
    x = jnp.where(segments > 0, x, 0.0)
    ends = jnp.pad(segments[:, 1:], ((0, 0), (0, 1))) != segments
    total = jnp.where(ends, _running_sum(x, segments, forward=True), 0.0)
    total = _running_sum(total, segments, forward=False)
    return jax.reshard(total, spec) if cut else total


# Every token of a segment adds to the sum of every other: the transpose is the function itself.
segment_sum.defvjp(
    lambda x, segments: (segment_sum(x, segments), segments),
    lambda segments, grad: (segment_sum(grad, segments), None),
)


def segment_mean(
    x: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Mean of x over the counted tokens of the token's segment; 0 where none counts."""
    count = segment_sum(mask, segments)
    return segment_sum(jnp.where(mask > 0, x, 0.0) * mask, segments) / jnp.maximum(count, 1.0)


def _running_sum(x: jax.Array, segments: jax.Array, *, forward: bool) -> jax.Array:
    """Inclusive sums of x over the tokens up to each one (or from it on) in its segment.

    A loop, not a chain: fused into one kernel the levels would compute each other again and again.
    """
    place = jnp.arange(x.shape[1])

    def level(i, x):
        shift = jnp.left_shift(1, i) if forward else -jnp.left_shift(1, i)
        inside = (place >= shift) & (place < x.shape[1] + shift)
        same = jnp.roll(segments, shift, axis=1) == segments
        return x + jnp.where(inside & same, jnp.roll(x, shift, axis=1), 0.0)

    return jax.lax.fori_loop(0, max(x.shape[1] - 1, 0).bit_length(), level, x)
