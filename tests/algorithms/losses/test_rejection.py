"""Rejections of tokens and responses on hand-made log ratios."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.losses.rejection import REJECTIONS, off_policy_sequences, seq_mean_k1
from jaxrl.algorithms.table import apply
from jaxrl.config.keys import AlgorithmConfig

LN2 = float(np.log(2.0))
# Two responses: ln 2 and -ln 2 (after a token of the prompt), and ln 4. Padding at the end.
SEGMENTS = jnp.array([[1, 1, 1, 2, 0]], jnp.int32)
MASK = jnp.array([[0.0, 1, 1, 1, 0]])
BEHAVIOR = jnp.full((1, 5), np.log(0.3))
LOG_RATIO = jnp.array([[9.0, LN2, -LN2, 2 * LN2, 9.0]])
# k2 = d^2 / 2: .240, .240, .961. k3 = exp(d) - 1 - d: 1 - .693 = .307, -.5 + .693 = .193, and
# 3 - 1.386 = 1.614
CASES = {
    "none": (dict(), [1, 1, 1]),
    "token_k1": (dict(rejection_low=0.9, rejection_high=3.0), [1, 0, 0]),
    "token_k2": (dict(rejection_max=0.3), [1, 1, 0]),
    "token_k3": (dict(rejection_max=0.2), [0, 1, 0]),
    "seq_sum_k1": (dict(rejection_low=0.9, rejection_high=1.1), [1, 1, 0]),  # products 1 and 4
    "seq_sum_k2": (dict(rejection_max=0.4), [0, 0, 0]),  # .480 and .961
    "seq_sum_k3": (dict(rejection_max=0.6), [1, 1, 0]),  # .5 and 1.614
    "seq_mean_k1": (dict(rejection_low=2.0, rejection_high=4.1), [0, 0, 1]),  # 1 and 4
    "seq_mean_k2": (dict(rejection_max=0.3), [1, 1, 0]),  # .240 and .961
    "seq_mean_k3": (dict(rejection_max=0.2), [0, 0, 0]),  # .25 and 1.614
    # the engine has q = .3 everywhere, p = .6, .15 and (at most 1) 1: .3 log .5 + .7 log 1.75 =
    # .184, .3 log 2 + .7 log(.7 / .85) = .072, and .3 log .3 + .7 log(.7e6) = 9.06; mean .128
    "seq_mean_binary_kl": (dict(rejection_max=0.13), [1, 1, 0]),
    "seq_max_k2": (dict(rejection_max=0.3), [1, 1, 0]),  # .240 and .961
    "seq_max_k3": (dict(rejection_max=0.3), [0, 0, 0]),  # .307 and 1.614
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_a_rejection_by_hand(name):
    keys, want = CASES[name]
    inputs = dict(log_ratio=LOG_RATIO, mask=MASK, segments=SEGMENTS, behavior_logp=BEHAVIOR)
    got = apply(REJECTIONS[name], inputs, AlgorithmConfig(**keys))
    np.testing.assert_array_equal(np.asarray(got)[0, 1:4], want)


def test_the_geometric_mean_does_not_depend_on_the_length():
    for length in (2, 32):
        log_ratio = jnp.full((1, length), -0.1)
        ones = jnp.ones((1, length))
        got = seq_mean_k1(
            log_ratio, ones, ones.astype(jnp.int32), rejection_low=0.9, rejection_high=1.1
        )
        assert got.all()


def test_infinite_ratios_are_rejected_and_leave_other_responses_alone():
    log_ratio = jnp.array([[0.0, 200.0, 0.1, 0.0, 0.0]])
    inputs = dict(log_ratio=log_ratio, mask=MASK, segments=SEGMENTS, behavior_logp=BEHAVIOR)
    cfg = AlgorithmConfig(rejection_low=0.5, rejection_high=2.0, rejection_max=0.5)
    for name, row in REJECTIONS.items():
        got = np.asarray(apply(row, inputs, cfg))[0, 1:4]
        rejected = [0, 1, 1] if name.startswith("token") else [0, 0, 1]
        np.testing.assert_array_equal(got, [1, 1, 1] if name == "none" else rejected)


def test_off_policy_sequences_are_masked_only_where_the_advantage_is_negative():
    # mean log(engine / policy): (ln 2 + 3 ln 2) / 2 = 2 ln 2 = 1.386, and -ln 2
    drift = -jnp.array([[9.0, LN2, 3 * LN2, -LN2, 9.0]])
    advantages = jnp.array([[0.0, -1.0, 1.0, -1.0, 0.0]])

    def masked(threshold):
        got = off_policy_sequences(
            drift, advantages, MASK, SEGMENTS, off_policy_threshold=threshold
        )
        return np.asarray(got)[0, 1:4]

    np.testing.assert_array_equal(masked(1.0), [0, 1, 1])
    np.testing.assert_array_equal(masked(1.5), [1, 1, 1])
