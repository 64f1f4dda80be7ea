"""Importance weights by hand."""

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.importance import geo_mean_rejection, icepop, seq_tis, token_tis

LN2 = float(np.log(2.0))
# Two responses: log ratios ln 2 and ln 2 (after a token of the prompt), and -ln 2.
SEGMENTS = jnp.array([[1, 1, 1, 2, 0]], jnp.int32)
MASK = jnp.array([[0.0, 1, 1, 1, 0]])
LOG_RATIO = jnp.array([[9.0, LN2, LN2, -LN2, 9.0]])


def counted(x):
    return np.asarray(x)[0, 1:4]


def test_token_weights_are_ratios_cut_from_above():
    np.testing.assert_allclose(counted(token_tis(LOG_RATIO, high=1.5)), [1.5, 1.5, 0.5])


def test_a_response_has_the_product_of_its_ratios():
    got = seq_tis(LOG_RATIO, MASK, SEGMENTS, high=5.0)
    np.testing.assert_allclose(counted(got), [4, 4, 0.5], rtol=1e-6)
    got = seq_tis(LOG_RATIO, MASK, SEGMENTS, high=3.0)
    np.testing.assert_allclose(counted(got), [3, 3, 0.5], rtol=1e-6)


def test_a_product_that_overflows_is_cut_too():
    got = seq_tis(LOG_RATIO * 1000, MASK, SEGMENTS, high=2.0)
    np.testing.assert_allclose(counted(got), [2, 2, 0])


def test_icepop_masks_what_lies_outside_its_bounds():
    np.testing.assert_allclose(counted(icepop(LOG_RATIO, low=0.4, high=1.9)), [0, 0, 0.5])
    np.testing.assert_allclose(counted(icepop(LOG_RATIO, low=0.6, high=2.1)), [2, 2, 0], rtol=1e-6)


def test_a_response_is_rejected_by_the_geometric_mean_of_its_ratios():
    log_ratio = jnp.array([[9.0, LN2, -LN2, -LN2, 9.0]])
    # means 0 and -ln 2: 1 and 1/2
    got = geo_mean_rejection(log_ratio, MASK, SEGMENTS, low=0.9, high=1.1)
    np.testing.assert_array_equal(counted(got), [1, 1, 0])
    got = geo_mean_rejection(log_ratio, MASK, SEGMENTS, low=0.4, high=0.9)
    np.testing.assert_array_equal(counted(got), [0, 0, 1])
