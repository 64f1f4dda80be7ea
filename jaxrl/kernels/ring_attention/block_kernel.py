"""Ring attention whose blocks are computed by an attention kernel of the platform.

In every step the kernel attends from all local queries to the keys that are visiting. It returns
the mean value and the log of its softmax denominator, by which the means of all steps are combined
(https://arxiv.org/abs/2310.01889; https://arxiv.org/abs/2311.01282, section 3.1). The backward pass
runs the kernel's backward pass with the denominator of all keys, and the sums of the keys'
gradients travel with the keys.

The 2c keys of a place are two chunks of the row. Those of a range of the row are one range too: one
that has keys of both chunks has the end of the first and the start of the second. A query of a row
with shared prefixes sees several ranges (kernels/key_ranges.py), and a step calls the kernel once
for each.
"""

import functools
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxrl.kernels.attention.online_softmax import MASKED, combine, pad_axis
from jaxrl.kernels.attention_spec import SAVED_NAME
from jaxrl.kernels.key_ranges import KeyRanges
from jaxrl.kernels.ring_attention.ring import Ring
from jaxrl.kernels.sinks import add_sinks, sink_gradient


@runtime_checkable
class BlockKernel(Protocol):
    """Attention of local queries to other tokens' keys; hashable.

    Arrays are [B, T, N, H], or [B, N, T, H] if `heads_first`, with T a multiple of `block`. `first`
    and `last` are int32 [B, T], the range of keys that each query sees, empty if first > last.
    """

    @property
    def heads_first(self) -> bool: ...

    @property
    def block(self) -> int: ...

    def forward(self, q, k, v, first, last) -> tuple[jax.Array, jax.Array]:
        """(mean like q, log Σ exp(score) like q without its last axis, float32).

        The log of an empty range is at most MASKED, and its mean is any finite number.
        """
        ...

    def backward(self, q, k, v, out, norm, d_out, first, last) -> tuple[jax.Array, ...]:
        """Contribution of these keys to (dq, dk, dv); `out` and `norm` are of all keys."""
        ...


def ring_in_blocks(
    kernel: BlockKernel,
    ring: Ring,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    sinks: Float[Array, "N"] | None,
    live: Bool[Array, "B T"],
    ranges: KeyRanges,
) -> Float[Array, "B T N H"]:
    """Attention of one device's queries, as `shard_ring` calls it; the ranges are of whole rows."""
    T = q.shape[1]

    def arrange(x: jax.Array) -> jax.Array:
        return x.swapaxes(1, 2) if kernel.heads_first else x

    rows = (arrange(pad_axis(x, 1, kernel.block)) for x in (q, k, v))
    if sinks is not None and kernel.heads_first:
        sinks = sinks[:, None]
    out = arrange(_ring(ring, kernel, *rows, ranges, sinks))[:, :T]
    return jnp.where(live[..., None, None], out, 0)


def ranges_of_rows(ring: Ring, segments, window, visibility):
    """(live queries of this place, ranges of the queries of whole rows)"""
    segments, visibility = ring.whole_rows((segments, visibility))
    return ring.tokens_here(segments) > 0, KeyRanges.of(segments, window, visibility)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(ring: Ring, kernel: BlockKernel, q, k, v, ranges: KeyRanges, sinks):
    return _forward(ring, kernel, q, k, v, ranges, sinks)[0]


def _forward(ring: Ring, kernel: BlockKernel, q, k, v, ranges: KeyRanges, sinks):
    def attend(step, keys, so_far):
        def add(ranges: KeyRanges, so_far):
            (k, v), (first, last) = keys, _here(ring, kernel, step, ranges)
            (out, norm), (more, more_norm) = so_far, kernel.forward(q, k, v, first, last)
            return combine(out, norm, more, more_norm)

        return ranges.fold(add, add(ranges, so_far))

    def step(s, carry):
        keys, so_far = carry
        return ring.pass_on(keys), attend(s, keys, so_far)

    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], MASKED, jnp.float32)
    keys, so_far = lax.fori_loop(0, ring.size - 1, step, ((k, v), nothing))
    out, norm = add_sinks(*attend(ring.size - 1, keys, so_far), sinks)
    out, norm = checkpoint_name((out.astype(q.dtype), norm), SAVED_NAME)
    return out, (q, k, v, ranges, sinks, out, norm)


def _backward(ring: Ring, kernel: BlockKernel, saved, d_out):
    q, k, v, ranges, sinks, out, norm = saved

    def attend(step, keys, grads):
        def add(ranges: KeyRanges, grads):
            (k, v), (first, last) = keys, _here(ring, kernel, step, ranges)
            some = kernel.backward(q, k, v, out, norm, d_out, first, last)
            return [grad + g for grad, g in zip(grads, some, strict=True)]

        return ranges.fold(add, add(ranges, grads))

    def step(s, carry):
        keys, grads = carry
        dq, *key_grads = attend(s, keys, grads)
        return ring.pass_on(keys), [dq, *ring.pass_on(key_grads)]

    grads = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    keys, grads = lax.fori_loop(0, ring.size - 1, step, ((k, v), grads))
    dq, *key_grads = attend(ring.size - 1, keys, grads)
    dk, dv = ring.pass_on(key_grads)
    d_sinks = sink_gradient(sinks, norm, out, d_out)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, d_sinks


_ring.defvjp(_forward, _backward)


def _here(ring: Ring, kernel: BlockKernel, step, ranges: KeyRanges) -> tuple[jax.Array, jax.Array]:
    """Range of each local query among the 2c keys that are here after `step` steps."""
    early, late = ring.bases(step)

    def n_before(place: jax.Array) -> jax.Array:
        n_early, n_late = (jnp.clip(place - base, 0, ring.chunk) for base in (early, late))
        return n_early + n_late

    first, last = ring.tokens_here((ranges.first, ranges.last))
    beyond = ((0, 0), (0, -first.shape[1] % kernel.block))  # empty ranges
    first = jnp.pad(n_before(first), beyond, constant_values=1)
    return first, jnp.pad(n_before(last + 1) - 1, beyond)
