import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.losses.step_labels import step_cross_entropy


def test_the_loss_is_the_cross_entropy_of_the_label():
    scores, labels = np.array([0.0, np.log(3.0), np.log(3.0), 1e3]), np.array([1, 1, 0.5, 1])
    loss, slope = step_cross_entropy(scores, labels)
    # σ = 1/2, 3/4, 3/4, 1: log 2, log 4/3, (log 4/3 + log 4) / 2, 0
    want = [np.log(2), np.log(4 / 3), (np.log(4 / 3) + np.log(4)) / 2, 0.0]
    np.testing.assert_allclose(loss, want, atol=1e-12)
    np.testing.assert_allclose(slope, [-0.5, -0.25, 0.25, 0.0], atol=1e-12)


def test_two_logits_with_a_softmax_are_their_difference():
    a, b = np.random.default_rng(0).normal(size=(2, 6))
    labels = np.array([0, 1, 0, 1, 1, 0])
    of_two = -np.asarray(jax.nn.log_softmax(np.stack([a, b], axis=-1)))[np.arange(6), labels]
    loss, _ = step_cross_entropy(b - a, labels * 1.0)
    np.testing.assert_allclose(loss, of_two, rtol=1e-5, atol=1e-6)


def test_the_derivative_is_that_of_jax():
    scores, labels = np.array([0.5, -2.0, 3.0]), np.array([1.0, 0.0, 0.25])

    def loss(s):
        right = jax.nn.sigmoid(s)
        return -(labels * jnp.log(right) + (1 - labels) * jnp.log(1 - right)).sum()

    _, slope = step_cross_entropy(scores, labels)
    np.testing.assert_allclose(slope, jax.grad(loss)(jnp.asarray(scores)), rtol=1e-5)
