"""Segment sums and maxima against a loop, at every position of a row and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.segment import segment_max, segment_mean, segment_sum
from sharding import make_mesh

SEGMENTS = jnp.array([[1, 1, 1, 2, 0, 3, 3, 0], [0, 1, 0, 0, 2, 2, 2, 2]], jnp.int32)
X = jnp.array([[1.0, 2, 3, 4, 99, 5, 6, 99], [99, 7, 99, 99, 1, 1, 1, 1]])


def test_every_token_gets_the_sum_of_its_segment():
    # 1 + 2 + 3, 4, 5 + 6; 7, 1 + 1 + 1 + 1
    want = [[6, 6, 6, 4, 0, 11, 11, 0], [0, 7, 0, 0, 4, 4, 4, 4]]
    np.testing.assert_array_equal(segment_sum(X, SEGMENTS), want)


def test_the_mean_is_over_counted_tokens():
    mask = jnp.array([[0.0, 1, 1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 1, 1]])
    # (2 + 3) / 2; nothing counts; 5; 7; (1 + 1) / 2
    want = [[2.5, 2.5, 2.5, 0, 0, 5, 5, 0], [0, 7, 0, 0, 1, 1, 1, 1]]
    np.testing.assert_allclose(segment_mean(X, mask, SEGMENTS), want)


def test_the_maximum_is_over_counted_tokens():
    mask = jnp.array([[0.0, 1, 1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 1, 1]])
    # max(-2, 3); nothing counts; 5; 7; max(-1, -4)
    x = jnp.array([[9.0, -2, 3, 4, 99, 5, 6, 99], [99, 7, 99, 99, 1, 1, -1, -4]])
    none = -np.inf
    want = [[3, 3, 3, none, none, 5, 5, none], [none, 7, none, none, -1, -1, -1, -1]]
    got = np.asarray(segment_max(x, mask, SEGMENTS))
    inside = np.asarray(SEGMENTS) > 0
    np.testing.assert_array_equal(got[inside], np.array(want)[inside])


def test_the_position_in_a_row_does_not_change_a_bit():
    rng = np.random.default_rng(0)
    values = rng.standard_normal(37).astype(np.float32)
    found = set()
    for start in (0, 1, 8, 27):
        x = rng.standard_normal((1, 64)).astype(np.float32)
        segments = np.where(np.arange(64) < start, 1, 3)[None].astype(np.int32)
        x[0, start : start + 37], segments[0, start : start + 37] = values, 2
        found.add(float(segment_sum(jnp.array(x), jnp.array(segments))[0, start]))
    assert len(found) == 1
    np.testing.assert_allclose(found.pop(), values.astype(np.float64).sum(), rtol=1e-6)


def test_the_gradient_is_that_of_the_sum_and_ignores_padding():
    weights = jnp.arange(16.0).reshape(2, 8)

    def total(x):
        return jnp.sum(segment_sum(x, SEGMENTS) * weights)

    # token 0 of row 0 adds to tokens 0, 1, 2: weight 0 + 1 + 2
    grad = jax.grad(total)(X)
    assert grad[0, 0] == 3 and grad[0, 5] == 5 + 6 and grad[1, 4] == 12 + 13 + 14 + 15
    np.testing.assert_array_equal(grad[SEGMENTS == 0], 0)


@pytest.mark.parametrize("spec", [jax.P("fsdp", None), jax.P("fsdp", "sequence")])
def test_rows_may_be_sharded_over_any_axes(spec):
    mesh = make_mesh(fsdp=2, sequence=2)
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        x, segments = jax.device_put((X, SEGMENTS), sharding)
        got = jax.jit(segment_sum)(x, segments)
        assert got.sharding.is_equivalent_to(sharding, 2)
        grad = jax.jit(jax.grad(lambda x: jnp.sum(segment_sum(x, segments))))(x)
        largest = jax.jit(segment_max)(x, x * 0 + 1, segments)
        assert largest.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(got, segment_sum(X, SEGMENTS))
    np.testing.assert_array_equal(np.asarray(grad)[0], [3, 3, 3, 1, 0, 2, 2, 0])
    np.testing.assert_array_equal(largest, segment_max(X, X * 0 + 1, SEGMENTS))
