"""Losses, advantages, KL estimators, corrections and aggregations of the user."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.losses.policy_loss import POLICY_LOSSES
from jaxrl.algorithms.table import apply, lookup
from jaxrl.algorithms.user_rows import TABLES, check_user_rows
from jaxrl.config import resolve
from jaxrl.config.keys import AlgorithmConfig
from tests.config.runnable import complaint, runnable

ROWS = """
import jax.numpy as jnp
import numpy as np
from jaxrl.algorithms.advantages import Advantage
from jaxrl.algorithms.kl import KLEstimator
from jaxrl.algorithms.losses.aggregation import Aggregation
from jaxrl.algorithms.losses.importance import ImportanceWeight
from jaxrl.algorithms.losses.policy_loss import PolicyLoss

def scaled(log_ratio, advantages, *, beta, clip_low=0.5):
    return -beta * jnp.exp(log_ratio) * advantages - clip_low

def centered(rewards):
    return rewards - rewards.mean()

GOOD = PolicyLoss(scaled, ("log_ratio", "advantages"), ("clip_low",))
ADVANTAGE = Advantage(centered, ("rewards",), needs_group=True)
KL = KLEstimator(lambda logp, ref_logp: jnp.abs(logp - ref_logp))
CORRECTION = ImportanceWeight(lambda log_ratio: jnp.exp(log_ratio))
SUM = Aggregation(
    lambda loss, mask, response_len, max_response_len: (jnp.sum(loss * mask), jnp.sum(mask)),
    weight="tokens",
)
WRONG_INPUT = PolicyLoss(lambda logits: logits, ("logits",))
WRONG_ORDER = PolicyLoss(lambda advantages, log_ratio: advantages, ("log_ratio", "advantages"))
WRONG_KEY = PolicyLoss(lambda logp, *, temperature: logp, ("logp",), ("temperature",))
WRONG_SHAPE = PolicyLoss(lambda logp: logp.sum(), ("logp",))
RAISES = PolicyLoss(lambda logp: logp.no_such_method(), ("logp",))
NAN = Advantage(lambda rewards: rewards * np.nan, ("rewards",))
CRITIC = Advantage(lambda rewards: rewards, ("rewards",), needs_critic=True)
TOKENS = Advantage(lambda token_rewards: token_rewards, ("token_rewards",), level="token")
NO_WEIGHT = Aggregation(
    lambda loss, mask, response_len, max_response_len: loss.sum(), weight="tokens"
)
"""


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.py"
    path.write_text(ROWS)
    return str(path)


def run_with(**keys):
    return resolve(runnable(**{f"algorithm__{key}": value for key, value in keys.items()}))


def test_a_row_of_the_user_is_called_with_its_inputs_keys_and_options(rows):
    row = lookup(POLICY_LOSSES, f"{rows}:GOOD?beta=2.0", "algorithm.policy_loss")
    inputs = {"log_ratio": jnp.zeros((1, 1)), "advantages": jnp.full((1, 1), 3.0)}
    got = apply(row, inputs, AlgorithmConfig(clip_low=0.25))
    np.testing.assert_allclose(got, [[-6.25]])  # -2 exp(0) 3 - 0.25


def test_rows_of_every_table_pass_the_checks_of_a_run(rows):
    names = {"policy_loss": "GOOD?beta=2.0", "advantage": "ADVANTAGE", "kl": "KL"}
    names |= {"correction": "CORRECTION", "rejection": "CORRECTION", "aggregation": "SUM"}
    assert set(names) == set(TABLES)
    check_user_rows(run_with(kl_coef=0.1, **{key: f"{rows}:{name}" for key, name in names.items()}))


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("policy_loss", "GOOD", "beta has no value; name it in hyper_parameters, or as an option"),
        ("policy_loss", "NOWHERE", "has no PolicyLoss .* 'NOWHERE'; set one that it has: GOOD"),
        ("policy_loss", "KL", "has no PolicyLoss"),
        ("policy_loss", "WRONG_INPUT", "unknown inputs logits; the inputs are advantages, log_"),
        ("policy_loss", "WRONG_ORDER", r"takes \(advantages, log_ratio\), not the inputs"),
        ("policy_loss", "WRONG_KEY", "temperature in hyper_parameters is no key of config.alg"),
        ("policy_loss", "WRONG_SHAPE", r"returns \(\), not \[B, T\]"),
        ("policy_loss", "RAISES", "a call raises AttributeError"),
        ("advantage", "NAN", "returns NaN or infinity"),
        ("advantage", "CRITIC", "needs_critic is not supported"),
        ("aggregation", "NO_WEIGHT", r"returns no \(sum, weight\)"),
    ],
)
def test_a_row_that_does_not_fit_is_one_message(key, name, message, rows):
    with pytest.raises(ValueError, match=message):
        check_user_rows(run_with(**{key: f"{rows}:{name}"}))


def test_what_a_row_declares_is_checked_against_the_other_keys(rows):
    with pytest.raises(ValueError, match=r"one ratio per response .* set .*'gspo_token'"):
        check_user_rows(run_with(advantage=f"{rows}:TOKENS", policy_loss="gspo"))
    with pytest.raises(ValueError, match=r"algorithm\.gamma=0\.9 has no effect"):
        check_user_rows(run_with(advantage=f"{rows}:ADVANTAGE", gamma=0.9))


def test_a_mistyped_name_is_told_that_files_are_possible():
    assert "or 'file.py:NAME'" in complaint(runnable(algorithm__policy_loss="ppoclip"))
