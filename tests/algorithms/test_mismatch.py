"""Rollout-trainer mismatch by hand, and the reductions that report it."""

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.masked import masked_max, masked_mean
from jaxrl.algorithms.mismatch import logp_diff, rollout_kl

LN2 = float(np.log(2.0))
TRAINER, ENGINE = jnp.array([[-1.0, -1.0, 5.0]]), jnp.array([[-1.0 - LN2, -1.0, -50.0]])
MASK = jnp.array([[1.0, 1.0, 0.0]])


def test_difference_and_kl():
    diff, kl = logp_diff(TRAINER, ENGINE), rollout_kl(TRAINER, ENGINE)
    np.testing.assert_allclose(diff[0, :2], [LN2, 0.0], rtol=1e-6)
    # the engine samples: exp(trainer - engine) - 1 - (trainer - engine) = 2 - 1 - ln 2
    np.testing.assert_allclose(kl[0, :2], [1.0 - LN2, 0.0], rtol=1e-6)


def test_masked_tokens_are_left_out_of_mean_and_max():
    diff = logp_diff(TRAINER, ENGINE)
    np.testing.assert_allclose(masked_mean(diff, MASK), (LN2, 2.0), rtol=1e-6)
    np.testing.assert_allclose(masked_max(diff, MASK), LN2, rtol=1e-6)


def test_the_maximum_of_no_tokens_never_wins():
    assert masked_max(jnp.ones((1, 3)), jnp.zeros((1, 3))) == -jnp.inf
