"""KL estimators against hand-computed values, and their expected gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.kl import KL_ESTIMATORS

LN2 = float(np.log(2.0))


def row(*values):
    return jnp.array([values], jnp.float32)


@pytest.mark.parametrize(
    ("name", "want"),
    [  # d = logp - ref_logp = ln 2, -ln 2
        ("k1", [LN2, -LN2]),
        ("abs", [LN2, LN2]),
        ("k2", [LN2**2 / 2, LN2**2 / 2]),
        # exp(-d) - 1 + d: 1/2 - 1 + ln 2 and 2 - 1 - ln 2
        ("k3", [LN2 - 0.5, 1.0 - LN2]),
    ],
)
def test_values(name, want):
    got = KL_ESTIMATORS[name].function(row(-1.0, -1.0), row(-1.0 - LN2, -1.0 + LN2))
    np.testing.assert_allclose(got[0], want, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "want"),
    [("k1", [1.0, 1.0]), ("abs", [1.0, -1.0]), ("k2", [LN2, -LN2]), ("k3", [0.5, -1.0])],
)
def test_gradients(name, want):
    # 1; sign(d); d; 1 - exp(-d) = 1 - 1/2 and 1 - 2
    ref = row(-1.0 - LN2, -1.0 + LN2)
    got = jax.grad(lambda logp: jnp.sum(KL_ESTIMATORS[name].function(logp, ref)))(row(-1.0, -1.0))
    np.testing.assert_allclose(got[0], want, rtol=1e-5)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name):
    logp, ref = row(-1.0, -1.0), row(-1.0 - LN2, -1.0 + LN2)

    def total(logp):
        return jnp.sum(KL_ESTIMATORS[f"{name}+"].function(logp, ref))

    value = KL_ESTIMATORS[f"{name}+"].function(logp, ref)
    np.testing.assert_allclose(value, KL_ESTIMATORS[name].function(logp, ref), rtol=1e-6)
    # the gradient of d^2 / 2 is d
    np.testing.assert_allclose(jax.grad(total)(logp)[0], [LN2, -LN2], rtol=1e-6)


@pytest.mark.parametrize("name", ["abs", "k2", "k3", "k1+", "abs+", "k3+"])
def test_equal_models_have_no_gradient(name):
    grad = jax.grad(lambda logp: jnp.sum(KL_ESTIMATORS[name].function(logp, row(-1.0))))(row(-1.0))
    np.testing.assert_array_equal(grad, 0.0)


def test_k3_is_accurate_for_nearly_equal_models():
    # d = 2^-13, exact in float32: d^2 / 2 = 2^-27, lost in 1 + d - 1 - d
    got = KL_ESTIMATORS["k3"].function(row(-1.0), row(-1.0 - 2.0**-13))
    np.testing.assert_allclose(got, 2.0**-27, rtol=1e-2)


def exact_kl(p, q):
    return jnp.sum(p * jnp.log(p / q))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_expected_gradient_is_that_of_the_documented_kl(name):
    logits, ref = jnp.array([0.3, -0.2, 0.9]), jax.nn.log_softmax(jnp.array([0.0, 0.5, 0.1]))
    p = jax.nn.softmax(logits)

    def expected(logits):  # over the three tokens, the sampling probabilities held fixed
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(p * KL_ESTIMATORS[name].function(logp[None], ref[None])[0])

    reverse = jax.grad(lambda x: exact_kl(jax.nn.softmax(x), jnp.exp(ref)))(logits)
    forward = jax.grad(lambda x: exact_kl(jnp.exp(ref), jax.nn.softmax(x)))(logits)
    want = {"k1": jnp.zeros(3), "k2": reverse, "k3": forward}[name]
    np.testing.assert_allclose(jax.grad(expected)(logits), want, atol=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_unbiased_estimators_average_to_the_kl(name):
    p, q = jnp.array([0.2, 0.5, 0.3]), jnp.array([0.4, 0.4, 0.2])
    got = jnp.sum(p * KL_ESTIMATORS[name].function(jnp.log(p)[None], jnp.log(q)[None])[0])
    np.testing.assert_allclose(got, exact_kl(p, q), rtol=1e-5)


def reward_gradient_share(name, seed, drift):
    """Policy gradient of minus the expected reward, projected on the gradient of the KL (exact).

    Over a vocabulary of 64, with respect to the logits: 1 is the KL's own gradient.
    """
    ref = np.random.default_rng(0).standard_normal(64)
    shift = drift * np.random.default_rng(seed).standard_normal(64)
    ref_logp, logp = (np.asarray(jax.nn.log_softmax(x)) for x in (ref, ref + shift))
    p = np.exp(logp)

    def policy_gradient(values):  # E[value ∇ log p] = p (value - E[value])
        return p * (values - (p * values).sum())

    wanted = policy_gradient(logp - ref_logp)
    values = KL_ESTIMATORS[name].function(jnp.asarray(logp)[None], jnp.asarray(ref_logp)[None])
    return float(policy_gradient(np.asarray(values)[0]) @ wanted / (wanted @ wanted))


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_only_k1_in_the_reward_has_the_gradient_of_the_kl(name):
    assert all(
        reward_gradient_share("k1", seed, 0.2) == pytest.approx(1, abs=1e-4) for seed in range(5)
    )
    small = [reward_gradient_share(name, seed, 0.05) for seed in range(50)]
    assert np.abs(small).max() < 0.05, "of second order in the drift"
    assert min(reward_gradient_share(name, seed, 0.2) for seed in range(50)) < 0, "wrong sign"


def test_the_unbiased_k3_has_value_and_gradient_of_the_kl_off_policy():
    logits, ref = jnp.array([0.3, -0.2, 0.9]), jax.nn.log_softmax(jnp.array([0.0, 0.5, 0.1]))
    old = jax.nn.log_softmax(jnp.array([-0.4, 0.6, 0.2]))  # the policy that sampled

    def expected(logits):
        logp = jax.nn.log_softmax(logits)
        values = KL_ESTIMATORS["k3_unbiased"].function((logp - old)[None], logp[None], ref[None])
        return jnp.sum(jnp.exp(old) * values[0])

    def kl(logits):
        return exact_kl(jax.nn.softmax(logits), jnp.exp(ref))

    np.testing.assert_allclose(expected(logits), kl(logits), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(expected)(logits), jax.grad(kl)(logits), atol=1e-6)
