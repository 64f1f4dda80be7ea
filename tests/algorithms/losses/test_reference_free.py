"""Preference losses without a reference model, by hand."""

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.losses.reference_free import (
    alpha_reward,
    cpo,
    cpo_hinge,
    cpo_ipo,
    orpo,
    sft,
    simpo,
)

# Two pairs; sums over 2 and 6 chosen tokens
CHOSEN, REJECTED, CHOSEN_LEN = (
    jnp.array([-2.0, -3.0]),
    jnp.array([-4.0, -1.0]),
    jnp.array([2.0, 6.0]),
)


def test_sft_is_a_mean_over_tokens():
    # 2 / 4 and 3 / 4: their mean is 5 / 8, the mean over 8 tokens
    np.testing.assert_allclose(sft(CHOSEN, CHOSEN_LEN), [0.5, 0.75])


def test_simpo_by_hand():
    # means -1 and -0.5, -2 and -1: margins 2 (1) - 0.5 and 2 (0.5) - 0.5; -log σ(1.5), -log σ(0.5)
    chosen, rejected = CHOSEN / CHOSEN_LEN, jnp.array([-2.0, -1.0])
    found = simpo(chosen, rejected, beta=2.0, simpo_gamma=0.5, label_smoothing=0.0)
    np.testing.assert_allclose(found, [0.201413, 0.474077], rtol=1e-5)


def test_cpo_by_hand():
    # margins 2 and -2 times 0.5: -log σ(±1), plus 0.1 times 0.5 and 0.75
    found = cpo(CHOSEN, REJECTED, CHOSEN_LEN, beta=0.5, cpo_alpha=0.1, label_smoothing=0.0)
    np.testing.assert_allclose(found, [0.313262 + 0.05, 1.313262 + 0.075], rtol=1e-5)


def test_cpo_with_hinge_and_ipo_by_hand():
    # margins 2 and -2: 1 - 0.5 (2) = 0 and 1 + 1 = 2; (2 - 1)² and (-2 - 1)²; plus 0.05 and 0.075
    found = cpo_hinge(CHOSEN, REJECTED, CHOSEN_LEN, beta=0.5, cpo_alpha=0.1)
    np.testing.assert_allclose(found, [0.05, 2.075], rtol=1e-5)
    found = cpo_ipo(CHOSEN, REJECTED, CHOSEN, CHOSEN_LEN, beta=0.5, cpo_alpha=0.1)
    np.testing.assert_allclose(found, [1.05, 9.075], rtol=1e-5)


def test_the_reward_of_alphapo_by_hand():
    # p = 1/4: (1 - 4^0.5) / 0.5 = -2; (1 - 1/4) / -1 = -0.75 for α = -1; log p for α = 0
    logp = jnp.log(jnp.array([0.25]))
    np.testing.assert_allclose(alpha_reward(logp, 0.5), [-2.0], rtol=1e-6)
    np.testing.assert_allclose(alpha_reward(logp, -1.0), [-0.75], rtol=1e-6)
    assert alpha_reward(logp, 0.0) is logp
    assert np.isfinite(alpha_reward(jnp.array([-1e4]), 1.0)).all()


def test_orpo_by_hand():
    # p = 1/2 and 3/4 of chosen tokens, 1/4 and 1/2 of rejected ones: odds ratios 1 / (1/3) = 3 and
    # 3 / 1 = 3; -log σ(log 3) = log(4 / 3) = 0.287682, times 0.5, plus 0.5 and 0.75
    chosen, rejected = jnp.log(jnp.array([0.5, 0.75])), jnp.log(jnp.array([0.25, 0.5]))
    found = orpo(chosen, rejected, CHOSEN, CHOSEN_LEN, beta=0.5)
    np.testing.assert_allclose(found, [0.5 + 0.143841, 0.75 + 0.143841], rtol=1e-5)
    certain = orpo(jnp.zeros(2), rejected, CHOSEN, CHOSEN_LEN, beta=0.5)
    assert np.isfinite(certain).all()
