"""Policy losses on hand-made ratios, their gradients, and which tokens they clip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.losses.policy_loss import (
    POLICY_LOSSES,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    dro,
    dual_clip,
    gmpo,
    gspo,
    gspo_token,
    kl_cov,
    policy_gradient,
    ppo_clip,
    sapo,
    vespo,
)
from jaxrl.algorithms.table import apply
from jaxrl.config.keys import AlgorithmConfig

CLIP = dict(clip_low=0.2, clip_high=0.3)
TAU = dict(sapo_tau_positive=1.0, sapo_tau_negative=2.0)


def row(*values):
    return jnp.array([values], jnp.float32)


RATIOS = row(1.0, 1.5, 1.5, 0.5, 0.5)
ADVANTAGES = row(2.0, 2.0, -2.0, 2.0, -2.0)
LOG_RATIO = jnp.log(RATIOS)  # and the logprobs, with those of the old policy 0


def slope(loss, log_ratio=LOG_RATIO):
    """d Σ loss / d log ratio of every token."""
    return jax.grad(lambda x: jnp.sum(loss(x)))(log_ratio)


def test_ppo_clip_takes_the_worse_of_ratio_and_clipped_ratio():
    got = ppo_clip(LOG_RATIO, ADVANTAGES, **CLIP)
    # -1 * 2; clipped to 1.3: -1.3 * 2; negative advantage keeps the larger ratio: 1.5 * 2;
    # positive keeps the smaller: -.5 * 2; clipped to .8: .8 * 2
    np.testing.assert_allclose(got, [[-2.0, -2.6, 3.0, -1.0, 1.6]], rtol=1e-6)


def test_ppo_clip_has_no_gradient_exactly_at_clipped_tokens():
    # d(-r A)/dlogp = -r A unless clipped: -2, 0, 3, -1, 0
    grad = slope(lambda x: ppo_clip(x, ADVANTAGES, **CLIP))
    np.testing.assert_allclose(grad, [[-2.0, 0.0, 3.0, -1.0, 0.0]], rtol=1e-6)


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone():
    ratios, advantages = row(5.0, 5.0, 2.0), row(2.0, -2.0, -2.0)

    def loss(log_ratio):
        return dual_clip(log_ratio, advantages, **CLIP, clip_dual=3.0)

    # -1.3 * 2; min(5 * 2, 3 * 2); 2 * 2 is below 6
    np.testing.assert_allclose(loss(jnp.log(ratios)), [[-2.6, 6.0, 4.0]], rtol=1e-6)
    np.testing.assert_allclose(slope(loss, jnp.log(ratios)), [[0.0, 0.0, 4.0]], rtol=1e-6)


def test_policy_gradient_is_minus_advantage_times_logprob():
    got = policy_gradient(row(-1.0, -2.0), row(3.0, -0.5))
    np.testing.assert_allclose(got, [[3.0, -1.0]])
    grad = slope(lambda logp: policy_gradient(logp, row(3.0, -0.5)), row(-1.0, -2.0))
    np.testing.assert_allclose(grad, [[-3.0, 0.5]])


# Two responses in one row: 2 tokens (after one prompt token) and 1 token.
# Log ratios .2 and .4, and -.5.
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0]], jnp.int32)
MASK = row(0, 1, 1, 0, 1, 0)
LOG_RATIOS = row(0, 0.2, 0.4, 0, -0.5, 0)
OF_RESPONSES = row(0, 2.0, 2.0, 0, -1.0, 0)
RESPONSE = (OF_RESPONSES, MASK, SEGMENTS)


def gspo_token_of(log_ratio, *inputs, **clip):
    """`gspo_token` with the log ratios as logprobs, which it also differentiates."""
    return gspo_token(log_ratio, log_ratio, *inputs, **clip)


def counted(x):
    return np.asarray(x)[0, [1, 2, 4]]


@pytest.mark.parametrize("loss", [gspo, gspo_token_of])
def test_gspo_has_one_ratio_for_a_response(loss):
    # s = exp((.2 + .4) / 2) = e^.3 = 1.3499, cut at 1.3; exp(-.5) = .6065 with A < 0 is cut at .8
    wide = loss(LOG_RATIOS, *RESPONSE, clip_low=0.5, clip_high=0.5)
    np.testing.assert_allclose(counted(wide), [-2 * np.e**0.3] * 2 + [np.e**-0.5], rtol=1e-6)
    tight = loss(LOG_RATIOS, *RESPONSE, **CLIP)
    np.testing.assert_allclose(counted(tight), [-2.6, -2.6, 0.8], rtol=1e-6)
    grad = slope(lambda logp: loss(logp, *RESPONSE, **CLIP), LOG_RATIOS)
    np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize("loss", [gspo, gspo_token_of])
def test_the_gradient_of_gspo_is_shared_by_the_tokens_of_a_response(loss):
    # the sum over two tokens of -2 s: each logp takes part in both with 1/2: -2 s
    grad = slope(lambda x: loss(x, *RESPONSE, clip_low=0.5, clip_high=0.5), LOG_RATIOS)
    np.testing.assert_allclose(counted(grad), [-2 * np.e**0.3] * 2 + [np.e**-0.5], rtol=1e-6)


def test_gspo_token_follows_the_advantage_of_each_token():
    advantages = row(0, 2.0, 1.0, 0, -1.0, 0)

    def loss(logp):
        return gspo_token_of(logp, advantages, MASK, SEGMENTS, clip_low=0.5, clip_high=0.5)

    want = [-2 * np.e**0.3, -(np.e**0.3), np.e**-0.5]
    np.testing.assert_allclose(counted(slope(loss, LOG_RATIOS)), want, rtol=1e-6)


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    # -clip(r) A logp with clip to [.8, 1.3]; its slope is -clip(r) A
    weight = np.array([1.0, 1.3, 1.3, 0.8, 0.8])
    got = cispo(LOG_RATIO, LOG_RATIO, ADVANTAGES, **CLIP)
    np.testing.assert_allclose(got[0], -weight * ADVANTAGES[0] * LOG_RATIO[0], rtol=1e-6)
    grad = slope(lambda logp: cispo(logp, logp, ADVANTAGES, **CLIP))
    np.testing.assert_allclose(grad[0], -weight * ADVANTAGES[0], rtol=1e-6)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    # A > 0: .2 and min(.4, .3) -> e^.25; A < 0: max(-.5, -.2) -> e^-.2
    want = [-2 * np.e**0.25] * 2 + [np.e**-0.2]
    got = gmpo(LOG_RATIOS, *RESPONSE, **CLIP)
    np.testing.assert_allclose(counted(got), want, rtol=1e-6)
    # only the token that is not clipped has a gradient: 2 tokens x -2 e^.25 / 2
    grad = slope(lambda logp: gmpo(logp, *RESPONSE, **CLIP), LOG_RATIOS)
    np.testing.assert_allclose(counted(grad), [-2 * np.e**0.25, 0, 0], rtol=1e-6)


def test_sapo_is_a_gate_of_slope_one_on_policy():
    # 4 sigmoid(0) A = 2 A for tau 1 and 4 / 2 / 2 A = A for tau 2
    got = sapo(row(0.0, 0.0), row(3.0, -3.0), **TAU)
    np.testing.assert_allclose(got, [[-6.0, 3.0]], rtol=1e-6)
    grad = slope(lambda x: sapo(x, row(3.0, -3.0), **TAU), row(0.0, 0.0))
    np.testing.assert_allclose(grad, [[-3.0, 3.0]], rtol=1e-6)
    # off policy r = 1.5, tau 2, A = -2: slope 4 sigmoid(1) sigmoid(-1) r A = 4 * .196612 * 1.5 * 2
    grad = slope(lambda x: sapo(x, ADVANTAGES, **TAU))
    np.testing.assert_allclose(grad[0, 2], 4 * 0.19661193 * 1.5 * 2, rtol=1e-5)


SELECTED = jnp.array([[True, False, True, False, False]])


def test_clip_cov_is_ppo_without_the_selected_tokens():
    def loss(log_ratio):
        return clip_cov(log_ratio, ADVANTAGES, SELECTED, **CLIP)

    np.testing.assert_allclose(loss(LOG_RATIO), [[0, -2.6, 0, -1.0, 1.6]], rtol=1e-6)
    np.testing.assert_allclose(slope(loss), [[0, 0, 0, -1.0, 0]], rtol=1e-6)


def test_kl_cov_penalizes_the_selected_tokens():
    # -r A: -2, -3, 3, -1, 1; plus 4 |log r| at the first (0) and the third (4 ln 1.5)
    def loss(log_ratio):
        return kl_cov(log_ratio, ADVANTAGES, SELECTED, kl_cov_coef=4.0)

    want = [[-2, -3, 3 + 4 * np.log(1.5), -1, 1]]
    np.testing.assert_allclose(loss(LOG_RATIO), want, rtol=1e-6)
    # slopes -r A, and + 4 if log r > 0
    np.testing.assert_allclose(slope(loss), [[-2, -3, 3 + 4, -1, 1]], rtol=1e-6)


# The probability of a token becomes .5, from .2, .9, .2, .9 and .45; log r = log(p / old p)
NOW = jnp.log(row(0.5, 0.5, 0.5, 0.5, 0.5))
BEFORE = jnp.log(row(0.2, 0.9, 0.2, 0.9, 0.45))
SIGNS = row(2.0, 2.0, -2.0, -2.0, 2.0)


def trust_region(loss, low, high, ratio_max=20.0, penalty=0.0):
    bounds = dict(clip_low=low, clip_high=high, ratio_max=ratio_max, log_ratio_penalty=penalty)
    return lambda logp: loss(logp - BEFORE, logp, SIGNS, **bounds)


def test_dppo_tv_masks_tokens_that_moved_far_in_the_direction_of_their_advantage():
    # changes .3, -.4, .3, -.4, .05 with bounds -.35 and .25: A > 0 masks +.3, A < 0 masks -.4;
    # the others have -r A with r = 2.5, .5556, 2.5, .5556, 1.1111
    grad = slope(trust_region(dppo_tv, 0.35, 0.25), NOW)
    np.testing.assert_allclose(grad, [[0, -2 / 1.8, 5, 0, -2 / 0.9]], rtol=1e-5)
    # wider bounds mask nothing, and the weight is at most 2
    grad = slope(trust_region(dppo_tv, 0.45, 0.35, ratio_max=2.0), NOW)
    np.testing.assert_allclose(grad, [[-4, -2 / 1.8, 4, 2 / 1.8, -2 / 0.9]], rtol=1e-5)
    value = trust_region(dppo_tv, 0.45, 0.35)(NOW)
    np.testing.assert_allclose(value[0, 0], -2.5 * 2 * np.log(0.5), rtol=1e-5)


def test_dppo_kl_masks_by_the_kl_between_this_token_and_any_other():
    # q log(q / p) + (1 - q) log((1 - q) / (1 - p)), for q = .2: .2 log .4 + .8 log 1.6 = .1927,
    # for q = .9: .9 log 1.8 + .1 log .2 = .3681, for q = .45: .0050
    grad = slope(trust_region(dppo_kl, 0.36, 0.19), NOW)
    np.testing.assert_allclose(grad, [[0, -2 / 1.8, 5, 0, -2 / 0.9]], rtol=1e-5)
    grad = slope(trust_region(dppo_kl, 0.37, 0.20), NOW)
    np.testing.assert_allclose(grad, [[-5, -2 / 1.8, 5, 2 / 1.8, -2 / 0.9]], rtol=1e-5)


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_masked_tokens_of_dppo_keep_the_squared_log_ratio(loss):
    # beta log r is the slope of beta / 2 (log r)^2: 0.1 log 2.5 at the masked first token
    grad = slope(trust_region(loss, 0.01, 0.01, penalty=0.1), NOW)
    np.testing.assert_allclose(grad[0, 0], 0.1 * np.log(2.5), rtol=1e-5)
    np.testing.assert_allclose(grad[0, 2], 5 + 0.1 * np.log(2.5), rtol=1e-5)


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_dppo_is_finite_at_probabilities_of_one_and_zero(loss):
    logp, old = row(0.0, 0.0, -20.0), row(0.0, -20.0, 0.0)

    def total(logp):
        bounds = dict(clip_low=0.2, clip_high=0.2, ratio_max=20.0, log_ratio_penalty=0.0)
        return loss(logp - old, logp, row(2.0, 2.0, -2.0), **bounds)

    assert np.isfinite(total(logp)).all()
    np.testing.assert_allclose(slope(total, logp), [[-2, 0, 0]], rtol=1e-6)


def test_dro_is_the_policy_gradient_with_a_quadratic_penalty():
    # -A logp + .5 / 2 (log r)^2 with log r = ln 2: 2 + .25 * .480453; slope -2 + .5 ln 2
    def loss(logp):
        return dro(logp + 1 + np.log(2.0), logp, row(2.0), log_ratio_penalty=0.5)

    np.testing.assert_allclose(loss(row(-1.0)), [[2 + 0.25 * np.log(2.0) ** 2]], rtol=1e-6)
    np.testing.assert_allclose(slope(loss, row(-1.0)), [[-2 + 0.5 * np.log(2.0)]], rtol=1e-6)


def test_vespo_weighs_whole_responses_by_a_smooth_function_of_their_ratio():
    keys = dict(vespo_k_positive=2.0, vespo_lambda_positive=3.0)
    keys |= dict(vespo_k_negative=3.0, vespo_lambda_negative=2.0)

    def loss(logp):  # the logprobs are the log ratios; the old ones are 0
        return vespo(logp, logp, *RESPONSE, **keys)

    # w = e^.6 = 1.8221, A = 2: w^2 exp(3 (1 - w)) = 3.3201 * .084902 = .28188
    # w = e^-.5 = .60653, A = -1: w^3 exp(2 (1 - w)) = .22313 * 2.19675 = .49016
    weights = [0.28188 * 2, 0.28188 * 2, -0.49016]
    np.testing.assert_allclose(counted(slope(loss, LOG_RATIOS)), -np.array(weights), rtol=1e-4)
    np.testing.assert_allclose(counted(loss(LOG_RATIOS))[1], -weights[1] * 0.4, rtol=1e-4)
    far = slope(lambda logp: vespo(logp, logp, *RESPONSE, **keys), 100 * LOG_RATIOS)
    np.testing.assert_allclose(counted(far), 0, atol=1e-12)


CFG = AlgorithmConfig(clip_low=0.2, clip_high=0.2, sapo_tau_negative=2.0, log_ratio_penalty=0.5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_has_the_plain_policy_gradient(name):
    """Descent raises good tokens and lowers bad ones, by -A at ratio 1."""
    old = row(-1.0, -2.0)

    def loss(logp):
        inputs = dict(logp=logp, log_ratio=logp - old, advantages=row(1.5, -0.5))
        inputs |= dict(mask=row(1, 1), segments=jnp.array([[1, 2]], jnp.int32))
        return apply(POLICY_LOSSES[name], inputs | {"selected": jnp.zeros((1, 2), bool)}, CFG)

    np.testing.assert_allclose(slope(loss, old), [[-1.5, 0.5]], rtol=1e-6)
