"""Causal depthwise convolution over packed rows: before the gated delta rule, or alone."""

import jax
import jax.numpy as jnp

from jaxrl.kernels.gated_delta.runs import run_numbers


def convolve(x, w, segments, tail, parents, activation=jax.nn.silu):
    """(activation(y) [B, T, N, H], new tails [B, W - 1, N, H]) on one device.

    y_t = sum over s < W of w[W - 1 - s] x_{t - s}, in float32, over the tokens of t's path. `tail`
    has the tokens before the row's first segment, which then begins at place 0. The new tails are
    the last tokens of each row's last segment. `parents` as in `parent_chunks`.
    """
    (B, T, *channels), W = x.shape, w.shape[-1]
    runs, live = run_numbers(segments), segments > 0
    before = jnp.zeros((B, W - 1, *channels), x.dtype) if tail is None else tail.astype(x.dtype)
    extended = jnp.concatenate([before, x], axis=1)
    runs = jnp.pad(runs, ((0, 0), (W - 1, 0)), constant_values=1)
    known = jnp.pad(live, ((0, 0), (W - 1, 0)), constant_values=tail is not None)

    last = jnp.max(jnp.where(live, jnp.arange(T), -1), axis=1)
    at = last[:, None] + 1 + jnp.arange(W - 1)
    kept = jnp.take_along_axis(extended, at[..., None, None], axis=1)
    run, of_last = (jnp.take_along_axis(runs, i, axis=1) for i in (at, at[:, -1:]))
    same = (run == of_last) & jnp.take_along_axis(known, at, axis=1)
    new_tail = jnp.where(same[..., None, None], kept, 0)

    def activate(extended, w):
        y = _taps(extended, w, runs, known)
        if parents is not None:
            y += _taps_of_parents(extended[:, W - 1 :], w, runs[:, W - 1 :], live, parents)
        y = _materialize_gradient(y)
        return jnp.where(live[..., None, None], activation(y), 0.0).astype(x.dtype)

    return jax.checkpoint(activate)(extended, w.astype(jnp.float32)), new_tail


def identity(y):
    """The activation of a convolution without one."""
    return y


@jax.custom_vjp
def _materialize_gradient(y):
    """Identity; its gradient, which every tap reads, is computed once and not for each of them."""
    return y


_materialize_gradient.defvjp(
    lambda y: (y, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),)
)


def _taps(extended, w, runs, known):
    """Sum over the tokens of the same run; `extended` [B, W - 1 + T, N, H]."""
    W = w.shape[-1]
    T = extended.shape[1] - (W - 1)
    y = jnp.zeros((), jnp.float32)
    for s in range(W):
        here = slice(W - 1 - s, W - 1 - s + T)
        seen = known[:, here] & (runs[:, here] == runs[:, W - 1 :])
        y += w[..., W - 1 - s] * jnp.where(seen[..., None, None], extended[:, here], 0)
    return y


def _taps_of_parents(x, w, runs, live, parents):
    """The part of `y` that is taken from the chunks before the segments that begin at chunks."""
    (B, T, *channels), n, W = x.shape, parents.shape[1], w.shape[-1]
    chunks = x.reshape(B, n, T // n, *channels)
    ends = jnp.pad(chunks[:, :, -(W - 1) :], ((0, 0), (1, 0)) + ((0, 0),) * 3)  # parent -1: zeros
    before = jnp.take_along_axis(ends, (parents + 1)[..., None, None, None], axis=1)
    first = runs[:, :: T // n]
    begins = jnp.pad(first[:, 1:] != runs[:, T // n - 1 : -1 : T // n], ((0, 0), (1, 0)))
    before = jnp.where((begins & live[:, :: T // n])[..., None, None, None], before, 0)
    y = [
        sum(w[..., W - 1 - s] * before[:, :, W - 1 + i - s] for s in range(i + 1, W))
        for i in range(W - 1)
    ]
    padding = ((0, 0), (0, 0), (0, T // n - (W - 1)), (0, 0), (0, 0))
    return jnp.pad(jnp.stack(y, axis=2), padding).reshape(x.shape)
