"""Rows of sequences in a pool of states against whole sequences of the reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.gated_delta import causal_conv, gated_delta
from jaxrl.kernels.gated_delta.pool import (
    SlotRows,
    advance_tails,
    pool_causal_conv,
    pool_gated_delta,
    step_causal_conv,
)
from sharding import DECODE, TRAIN

LENGTHS, T, SLOTS = (70, 2, 33), 32, 8


def tokens(n: int, width: int, seed: int = 0):
    return np.random.default_rng(seed).standard_normal((len(LENGTHS), n, 2, width), np.float32)


def rows_of(lengths, first, last):
    """(sequence, place, length, source, target) of the rows of each sequence."""
    rows = []
    for b, n in enumerate(lengths):
        for start in range(0, n, T):
            source = first[b] if start == 0 else last[b]
            rows.append((b, start, min(T, n - start), source, last[b]))
    return rows


def slot_rows(rows, n_padding):
    sources = [row[3] for row in rows] + [0] * n_padding
    targets = [row[4] for row in rows] + [0] * n_padding
    lengths = [row[2] for row in rows] + [0] * n_padding
    live = np.arange(T) < np.array(lengths)[:, None]
    return SlotRows(*map(jnp.asarray, (np.int32(sources), np.int32(targets), live)))


def pick(x, rows, n_padding):
    out = np.full((len(rows) + n_padding, T, *x.shape[2:]), 7.0, np.float32)
    for r, (b, start, n, *_) in enumerate(rows):
        out[r, :n] = x[b, start : start + n]
    return jnp.asarray(out)


@pytest.mark.thorough  # tests/engine/test_states.py compares such rows with training by default
@pytest.mark.parametrize("from_slots", [False, True])
def test_rows_give_outputs_and_states_of_whole_sequences(one_device, from_slots):
    """Also where a first part of each sequence, of 0 to 3 tokens, was computed before."""
    begun = np.array([1, 0, 3]) if from_slots else np.zeros(3, int)
    total = begun + LENGTHS
    N, D, V, W = 4, 8, 16, 4
    x, w = tokens(80, D), np.random.default_rng(1).standard_normal((2, D, W), np.float32)
    q, k = (tokens(80, D, i) / D**0.5 for i in (2, 3))
    v = np.repeat(tokens(80, V, 4), 2, axis=2)
    random = np.random.default_rng(5)
    g, beta = random.uniform(-1, 0, (3, 80, N)), random.uniform(0, 1, (3, 80, N))
    segments = (np.arange(80) < total[:, None]).astype(np.int32)
    how: Any = dict(segments=jnp.asarray(segments), rules=TRAIN)
    want_x, want_tail = causal_conv(jnp.asarray(x), jnp.asarray(w), **how)
    args = [jnp.asarray(a, jnp.float32) for a in (q, k, v, g, beta)]
    want, want_states = gated_delta(*args, **how, implementation="reference")

    tails, states = jnp.zeros((SLOTS, W - 1, 2, D)), jnp.zeros((SLOTS, N, D, V))
    first, last = [0, 0, 0], [3, 5, 2]
    for lengths, starts in ([(begun, np.zeros(3, int))] if from_slots else []) + [(LENGTHS, begun)]:
        rows = rows_of(lengths, first, last)
        slots = slot_rows(rows, n_padding=2)

        def part(a, starts=starts, rows=rows):
            moved = np.stack([np.roll(a[b], -starts[b], axis=0) for b in range(3)])
            return pick(moved, rows, 2)

        call = jax.jit(pool_causal_conv, static_argnames="rules")
        y, tails = call(part(x), jnp.asarray(w), tails, slots=slots, rules=DECODE)
        call = jax.jit(pool_gated_delta, static_argnames="rules")
        out, states = call(*map(part, (q, k, v, g, beta)), states, slots=slots, rules=DECODE)
        first = [slot if n else 0 for slot, n in zip(last, lengths, strict=True)]
    for r, (b, start, n, *_) in enumerate(rows):
        here = slice(begun[b] + start, begun[b] + start + n)
        np.testing.assert_allclose(y[r, :n], want_x[b, here], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out[r, :n], want[b, here], rtol=1e-4, atol=1e-5)
        assert not np.any(out[r, n:])
    np.testing.assert_allclose(states[jnp.asarray(last)], want_states, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tails[jnp.asarray(last)], want_tail, rtol=1e-6)
    assert not np.any(states[0]) and not np.any(tails[0])


def test_a_step_of_the_convolution_goes_on_from_its_slots(one_device):
    x, w = tokens(6, 8), np.random.default_rng(1).standard_normal((2, 8, 4), np.float32)
    live = np.array([[1, 1], [1, 0], [0, 0]], bool)
    whole = np.concatenate([np.ones((3, 4), bool), live], axis=1)
    want, tail = causal_conv(
        jnp.asarray(x), jnp.asarray(w), segments=jnp.asarray(whole, jnp.int32), rules=TRAIN
    )
    before = jnp.zeros((SLOTS, 3, 2, 8)).at[jnp.array([3, 5, 2])].set(x[:, 1:4])
    how: Any = dict(slots=jnp.array([3, 5, 2]), live=jnp.asarray(live), rules=DECODE)
    out, tails = step_causal_conv(jnp.asarray(x[:, 4:]), jnp.asarray(w), before, **how)
    np.testing.assert_allclose(np.asarray(out)[live], np.asarray(want)[:, 4:][live], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(tails)[[3, 5, 2]], tail, rtol=1e-6)
    np.testing.assert_array_equal(advance_tails(jnp.asarray(x[:, 4:]), before, **how), tails)
