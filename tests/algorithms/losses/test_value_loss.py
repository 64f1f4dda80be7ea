"""The value loss by hand, and the direction of its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.losses.value_loss import clipped, value_loss


def row(*numbers: float) -> jax.Array:
    return jnp.array([numbers], jnp.float32)


def test_value_loss_by_hand():
    values, old, returns = row(1.0, 1.0, 3.0, 0.0), row(0.0, 0.0, 0.0, 1.0), row(2.0, 0.0, 2.0, 0.0)
    # within 0.5 of the old value: 0.5, 0.5, 0.5, 0.5; the larger of the two squares, halved:
    # (1-2)² = 1 < (0.5-2)² = 2.25; (1-0)² = 1 > 0.25;
    # (3-2)² = 1 < (0.5-2)² = 2.25; 0 < (0.5-0)² = 0.25
    loss = value_loss(values, old, returns, clip=0.5)
    np.testing.assert_allclose(loss, row(1.125, 0.5, 1.125, 0.125))
    np.testing.assert_array_equal(clipped(values, old, returns, clip=0.5), row(1, 0, 1, 1))


def test_without_a_clip_it_is_half_the_square():
    values, old, returns = row(1.0, -3.0), row(0.0, 0.0), row(2.0, 1.0)
    np.testing.assert_allclose(value_loss(values, old, returns, clip=0.0), row(0.5, 8.0))
    assert not clipped(values, old, returns, clip=0.0).any()


@pytest.mark.parametrize(
    ("value", "push"),
    [
        (0.2, -1.8),  # V - R, free to rise
        (0.6, 0.0),  # it rose by more than 0.5 towards R = 2
        (-0.6, -2.6),  # it fell, away from R: it may move back
        (3.0, 0.0),  # beyond R, but the clipped 0.5 is farther from R
        (4.0, 2.0),  # so far beyond R that it moves back
    ],
)
def test_values_move_towards_their_return_unless_clipped(value, push):
    grad = jax.grad(lambda v: value_loss(v, row(0.0), row(2.0), clip=0.5).sum())(row(value))
    np.testing.assert_allclose(grad, row(push), rtol=1e-6)
    held = clipped(row(value), row(0.0), row(2.0), clip=0.5)
    assert bool(held[0, 0]) == (push == 0.0)
