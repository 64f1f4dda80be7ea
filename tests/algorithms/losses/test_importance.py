"""Importance weights and the mismatch metrics on hand-made logprobs."""

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.losses.aggregation import masked_max, masked_mean
from jaxrl.algorithms.losses.importance import (
    icepop,
    logp_diff,
    mean_weight,
    rollout_kl,
    seq_icepop,
    seq_tis,
    token_tis,
)

LN2 = float(np.log(2.0))
# Two responses: log ratios ln 2 and ln 2 (after a token of the prompt), and -ln 2.
SEGMENTS = jnp.array([[1, 1, 1, 2, 0]], jnp.int32)
MASK = jnp.array([[0.0, 1, 1, 1, 0]])
LOG_RATIO = jnp.array([[9.0, LN2, LN2, -LN2, 9.0]])


def counted(x):
    return np.asarray(x)[0, 1:4]


def test_token_weights_are_ratios_truncated_from_above():
    got = token_tis(LOG_RATIO, correction_floor=0.0, correction_high=1.5)
    np.testing.assert_allclose(counted(got), [1.5, 1.5, 0.5])
    got = token_tis(LOG_RATIO, correction_floor=0.8, correction_high=5.0)
    np.testing.assert_allclose(counted(got), [2.0, 2.0, 0.8], rtol=1e-6)


def test_a_response_has_the_product_of_its_ratios():
    got = seq_tis(LOG_RATIO, MASK, SEGMENTS, correction_floor=0.0, correction_high=5.0)
    np.testing.assert_allclose(counted(got), [4, 4, 0.5], rtol=1e-6)
    got = seq_tis(LOG_RATIO, MASK, SEGMENTS, correction_floor=0.8, correction_high=3.0)
    np.testing.assert_allclose(counted(got), [3, 3, 0.8], rtol=1e-6)


def test_a_product_that_overflows_is_truncated_too():
    got = seq_tis(LOG_RATIO * 1000, MASK, SEGMENTS, correction_floor=0.0, correction_high=2.0)
    np.testing.assert_allclose(counted(got), [2, 2, 0])


def test_icepop_masks_ratios_outside_its_bounds():
    got = icepop(LOG_RATIO, correction_low=0.4, correction_high=1.9)
    np.testing.assert_allclose(counted(got), [0, 0, 0.5])
    got = icepop(LOG_RATIO, correction_low=0.6, correction_high=2.1)
    np.testing.assert_allclose(counted(got), [2, 2, 0], rtol=1e-6)


def test_icepop_of_responses_masks_products_outside_its_bounds():
    got = seq_icepop(LOG_RATIO, MASK, SEGMENTS, correction_low=0.6, correction_high=5.0)
    np.testing.assert_allclose(counted(got), [4, 4, 0], rtol=1e-6)
    got = seq_icepop(LOG_RATIO, MASK, SEGMENTS, correction_low=0.1, correction_high=3.0)
    np.testing.assert_allclose(counted(got), [0, 0, 0.5], rtol=1e-6)


def test_the_mean_weight_is_over_tokens_or_over_responses():
    weights, lengths = jnp.array([[9.0, 2.0, 2.0, 0.5, 9.0]]), jnp.array([[2.0, 2, 2, 1, 1]])
    total, count = mean_weight(weights, MASK, lengths, level="token")
    np.testing.assert_allclose((total, count), (4.5, 3.0))
    total, count = mean_weight(weights, MASK, lengths, level="response")
    np.testing.assert_allclose((total, count), (2.5, 2.0))


TRAINER, ENGINE = jnp.array([[-1.0, -1.0, 5.0]]), jnp.array([[-1.0 - LN2, -1.0, -50.0]])
DIFF_MASK = jnp.array([[1.0, 1.0, 0.0]])


def test_logprob_difference_and_kl_between_engine_and_trainer():
    diff, kl = logp_diff(TRAINER, ENGINE), rollout_kl(TRAINER, ENGINE)
    np.testing.assert_allclose(diff[0, :2], [LN2, 0.0], rtol=1e-6)
    # the engine samples: exp(trainer - engine) - 1 - (trainer - engine) = 2 - 1 - ln 2
    np.testing.assert_allclose(kl[0, :2], [1.0 - LN2, 0.0], rtol=1e-6)


def test_masked_tokens_are_excluded_from_mean_and_max():
    diff = logp_diff(TRAINER, ENGINE)
    np.testing.assert_allclose(masked_mean(diff, DIFF_MASK), (LN2, 2.0), rtol=1e-6)
    np.testing.assert_allclose(masked_max(diff, DIFF_MASK), LN2, rtol=1e-6)
