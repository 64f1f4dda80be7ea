"""Limits of linear layers, by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.layers.limits import clip


def test_clip_limits_values_and_its_gradient_is_one_between_the_limits():
    """At a limit itself the gradient is one, as that of torch.clamp."""
    x = jnp.array([-2.0, -1.0, 0.5, 3.0, 4.0])
    low, high = jnp.float32(-1), jnp.float32(3)
    value, grad = jax.vjp(lambda x: clip(x, low, high), x)
    np.testing.assert_array_equal(value, [-1, -1, 0.5, 3, 3])
    np.testing.assert_array_equal(grad(jnp.ones(5))[0], [0, 1, 1, 1, 0])


def test_limits_are_constants_and_may_be_infinite():
    x = jnp.array([-5.0, 7.0])
    grads = jax.grad(lambda low, high: clip(x, low, high).sum(), argnums=(0, 1))
    assert grads(jnp.float32(-1), jnp.float32(1)) == (0, 0)
    np.testing.assert_array_equal(clip(x, jnp.float32(-np.inf), jnp.float32(np.inf)), x)


def test_a_limited_value_keeps_its_dtype():
    x = jnp.array([1.0, 2.0], jnp.bfloat16)
    assert clip(x, jnp.float32(0), jnp.float32(1.5)).dtype == jnp.bfloat16
