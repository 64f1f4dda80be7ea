"""Ring attention whose blocks are computed by an attention kernel of the platform.

In every step the kernel attends from all local queries to the keys that are visiting. It returns
the mean value and the log of its softmax denominator, by which the means of all steps are combined
(https://arxiv.org/abs/2310.01889; https://arxiv.org/abs/2311.01282, section 3.1). The backward pass
runs the kernel's backward pass with the denominator of all keys, and the sums of the keys'
gradients travel with the keys.

The 2c keys of a place are two chunks of the row. Those that are visible to a query are one range: a
query that sees keys of both chunks sees the end of the first and the start of the second. Both ends
of the range never decrease from one query to the next.
"""

import functools
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl.kernels.attention.blocks import MASKED, pad_axis
from jaxrl.kernels.attention_spec import SAVED_NAME
from jaxrl.kernels.ring_attention.ring import Ring


@runtime_checkable
class BlockKernel(Protocol):
    """Attention of local queries to other tokens' keys; hashable.

    Arrays are [B, T, N, H], or [B, N, T, H] if `heads_first`, with T a multiple of `block`. `first`
    and `last` are int32 [B, T], the range of visible keys of each query, empty if first > last.
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
        """What these keys contribute to (dq, dk, dv); `out` and `norm` are those of all keys."""
        ...


def ring_in_blocks(
    kernel: BlockKernel,
    ring: Ring,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    first: jax.Array,
    last: jax.Array,
) -> Float[Array, "B T N H"]:
    """Attention of one device's queries, as `shard_ring` calls it."""
    T, live = q.shape[1], last >= 0
    # Padding attends to itself: a softmax over no key is not finite.
    here = ring.positions()
    first, last = jnp.where(live, first, here), jnp.where(live, last, here)
    end, beyond = 2 * ring.size * ring.chunk, ((0, 0), (0, -T % kernel.block))
    first = jnp.pad(first, beyond, constant_values=end)
    last = jnp.pad(last, beyond, constant_values=end - 1)

    def arrange(x: jax.Array) -> jax.Array:
        return x.swapaxes(1, 2) if kernel.heads_first else x

    rows = (arrange(pad_axis(x, 1, kernel.block)) for x in (q, k, v))
    out = arrange(_ring(ring, kernel, *rows, first, last))[:, :T]
    return jnp.where(live[..., None, None], out, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(ring: Ring, kernel: BlockKernel, q, k, v, first, last):
    return _forward(ring, kernel, q, k, v, first, last)[0]


def _forward(ring: Ring, kernel: BlockKernel, q, k, v, first, last):
    def attend(step, keys, so_far):
        low, high = _here(ring, step, first, last)
        out, norm = so_far
        more, more_norm = kernel.forward(q, keys[0], keys[1], low, high)
        return combine(out, norm, more, more_norm)

    def step(s, carry):
        keys, so_far = carry
        return ring.pass_on(keys), attend(s, keys, so_far)

    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], MASKED, jnp.float32)
    keys, so_far = lax.fori_loop(0, ring.size - 1, step, ((k, v), nothing))
    out, norm = attend(ring.size - 1, keys, so_far)
    out, norm = checkpoint_name((out.astype(q.dtype), norm), SAVED_NAME)
    return out, (q, k, v, first, last, out, norm)


def combine(
    out: Float[Array, "*A H"],
    norm: Float[Array, "*A"],
    more: Float[Array, "*A H"],
    more_norm: Float[Array, "*A"],
) -> tuple[jax.Array, jax.Array]:
    """The mean over two sets of keys, float32, and the log of its softmax denominator."""
    total = jnp.logaddexp(norm, more_norm)
    weight, more_weight = jnp.exp(norm - total), jnp.exp(more_norm - total)
    return out * weight[..., None] + more.astype(jnp.float32) * more_weight[..., None], total


def _backward(ring: Ring, kernel: BlockKernel, saved, d_out):
    q, k, v, first, last, out, norm = saved

    def attend(step, keys, grads):
        low, high = _here(ring, step, first, last)
        some = kernel.backward(q, keys[0], keys[1], out, norm, d_out, low, high)
        return [grad + g for grad, g in zip(grads, some, strict=True)]

    def step(s, carry):
        keys, grads = carry
        dq, *key_grads = attend(s, keys, grads)
        return ring.pass_on(keys), [dq, *ring.pass_on(key_grads)]

    grads = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    keys, grads = lax.fori_loop(0, ring.size - 1, step, ((k, v), grads))
    dq, *key_grads = attend(ring.size - 1, keys, grads)
    dk, dv = ring.pass_on(key_grads)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_ring.defvjp(_forward, _backward)


def _here(ring: Ring, step, first, last) -> tuple[jax.Array, jax.Array]:
    """Visible range of every query among the 2c keys that are here after `step` steps."""

    early, late = ring.bases(step)

    def n_before(position: jax.Array) -> jax.Array:
        n_early, n_late = (jnp.clip(position - base, 0, ring.chunk) for base in (early, late))
        return n_early + n_late

    return n_before(first), n_before(last + 1) - 1
