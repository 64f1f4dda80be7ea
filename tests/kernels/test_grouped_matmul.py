"""Grouped matrix products (jaxrl/kernels/grouped_matmul/) against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.grouped_matmul import IMPLEMENTATIONS, grouped_matmul
from jaxrl.kernels.grouped_matmul.blocks import block_rows

M, D, F, E = 100, 24, 40, 6
GROUPS = {
    "even": (17, 17, 17, 17, 16, 16),
    "empty groups": (0, 60, 0, 39, 1, 0),
    "one group": (0, 0, 0, 0, 100, 0),
    "rows of no group": (3, 0, 20, 9, 0, 5),
    "no rows": (0, 0, 0, 0, 0, 0),
}


def problem(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((M, D), (E, F, D), (M, F))
    return tuple(jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))


@functools.partial(jax.jit, static_argnames="name")
def value_and_grads(x, w, sizes, dy, name):
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation=name), x, w)
    return y, *pull(dy)


def test_each_row_is_multiplied_with_its_groups_matrix():
    x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    w = jnp.array([[[1.0, 0.0]], [[9.0, 9.0]], [[1.0, 10.0]]])  # one row each
    sizes = jnp.array([1, 0, 2])
    # row 0 x [1, 0]: 1; rows 1 and 2 x [1, 10]: 3 + 40, 5 + 60; row 3 is in no group
    for name in IMPLEMENTATIONS:
        y = grouped_matmul(x, w, sizes, implementation=name)
        np.testing.assert_array_equal(y, [[1.0], [43.0], [65.0], [0.0]])


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", [None, "blocks", "ragged_dot"])
def test_value_and_gradients_equal_the_reference(name, groups):
    x, w, dy = problem()
    sizes = jnp.array(GROUPS[groups], jnp.int32)
    want = value_and_grads(x, w, sizes, dy, "reference")
    for a, b in zip(value_and_grads(x, w, sizes, dy, name), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()) + 1e-30)


def test_bfloat16_is_summed_in_float32():
    x, w, dy = problem(jnp.bfloat16)
    sizes = jnp.array(GROUPS["even"], jnp.int32)
    wide = value_and_grads(
        *(a.astype(jnp.float32) for a in (x, w)), sizes, dy.astype(jnp.float32), "reference"
    )
    for a, b in zip(value_and_grads(x, w, sizes, dy, "blocks"), wide, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2**-8, atol=1e-3)  # one rounding


@pytest.mark.bitwise
def test_a_rows_bits_do_not_depend_on_other_rows():
    """With another block size, group size and position in the group."""
    D, F, E = 256, 384, 4
    x = jax.random.normal(jax.random.key(1), (1024, D))
    w = jax.random.normal(jax.random.key(2), (E, F, D))
    multiply = jax.jit(functools.partial(grouped_matmul, implementation="blocks"))
    assert block_rows(1024, E) == 128 and block_rows(9, E) == 8
    many = multiply(x, w, jnp.array([500, 0, 500, 24]))
    few = multiply(x[497:506], w, jnp.array([3, 0, 6, 0]))
    np.testing.assert_array_equal(many[497:506], few)
    shifted = multiply(x[97:], w, jnp.array([403, 0, 500, 24]))
    np.testing.assert_array_equal(many[97:], shifted)


def test_an_unknown_kernel_is_a_clear_error():
    x, w, _ = problem()
    with pytest.raises(ValueError, match="'nothing' is not known; set one of auto, blocks"):
        grouped_matmul(x, w, jnp.zeros(E, jnp.int32), implementation="nothing")
