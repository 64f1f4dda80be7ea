"""All pairs of names of the algorithm against a table written by hand, and the presets.

Tests of jaxrl/config/preconditions.py, scripts/pages/combinations.py and presets.py.
"""

import functools
import itertools

import pytest

from jaxrl.config import resolve
from jaxrl.config.choices import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KLS, POLICY_LOSSES
from jaxrl.config.preconditions import PRECONDITIONS
from scripts.pages.combinations import NAMES, PRINTED, outcome
from scripts.pages.presets import CORRECTION_PRESETS
from tests.config.runnable import runnable

# Losses of one term per response, which cannot tell the tokens of a response apart.
RESPONSE_LOSSES = ("gspo", "gmpo", "vespo")
MEAN_OF_TOKENS = ("gspo", "gmpo")  # the weights of a response's tokens act as their mean
EACH_SEQUENCE = ("gspo", "gspo_token", "gmpo", "sapo")  # mean over responses in their papers
EVERY_RESPONSE_ADVANTAGE = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "grpo_passk",
    "grpo_batch_std",
    "max_rl",
    "gdpo",
    "flash_reinforce",
    "online_dpo",
    "rae",
    "hierarchical_grpo",
)
EACH_TOKEN_ADVANTAGE = (
    *("gae", "reinforce_plus_plus", "distill", "gigpo"),
    "optimal_token_baseline",
)
# (key, names, other key, names): every other pair is accepted.
REFUSED = [
    ("policy_loss", RESPONSE_LOSSES, "advantage", EACH_TOKEN_ADVANTAGE),
    ("kl", ("k1",), "kl_in", ("loss",)),
    ("kl", ("abs", "k2", "k3", "k3_unbiased", "full", "jsd"), "kl_in", ("reward",)),
    ("kl", ("abs+", "k2+", "k3+", "full+"), "kl_in", ("reward",)),
    # one needs rewards of 0 or more, the other reads each reward apart; k1 has no other place
    ("advantage", ("max_rl", "gdpo", "rae", "hierarchical_grpo"), "kl_in", ("reward",)),
    ("advantage", ("max_rl", "gdpo", "rae", "hierarchical_grpo"), "kl", ("k1",)),
    # its margins are the KL penalties
    ("advantage", ("online_dpo",), "kl_in", ("loss",)),
    ("advantage", ("online_dpo",), "kl", [kl for kl in KLS if kl not in ("k1", "k1+")]),
    ("policy_loss", ("vespo",), "correction", ("token_tis", "seq_tis", "icepop", "seq_icepop")),
    ("correction", ("token_tis", "seq_tis", "icepop", "seq_icepop"), "old_logp", ("rollout",)),
]
WARNED = [
    # dr_grpo and these losses each want their own aggregation
    ("advantage", ("dr_grpo",), "policy_loss", EACH_SEQUENCE),
    ("advantage", ("dr_grpo",), "aggregation", AGGREGATIONS[:4]),
    (
        "policy_loss",
        EACH_SEQUENCE,
        "aggregation",
        ("token_mean", "token_sum", "seq_mean_token_sum_norm"),
    ),
    ("advantage", ("online_dpo",), "policy_loss", ("gmpo", "sapo")),
    (
        "advantage",
        ("online_dpo",),
        "aggregation",
        [name for name in AGGREGATIONS if name != "seq_mean_token_sum"],
    ),
    # with gspo it is LUSPO
    ("policy_loss", ("gmpo", "sapo"), "aggregation", ("seq_mean_token_sum",)),
    ("policy_loss", MEAN_OF_TOKENS, "correction", ("token_tis", "icepop")),
    ("policy_loss", MEAN_OF_TOKENS, "rejection", ("token_k1", "token_k2", "token_k3")),
]


@functools.cache
def outcomes() -> dict[tuple[tuple[str, str], tuple[str, str]], str]:
    """The outcome of every pair of names of two keys, in the order of `NAMES`."""
    return {
        ((key, name), (other, value)): outcome({key: name, other: value})
        for key, other in itertools.combinations(NAMES, 2)
        for name, value in itertools.product(NAMES[key], NAMES[other])
    }


def expected() -> dict:
    """The outcome of every pair by the tables above."""
    found = dict.fromkeys(outcomes(), "accepted")
    for result, table in (("warned", WARNED), ("refused", REFUSED)):
        for key, names, other, values in table:
            for a, b in itertools.product(names, values):
                pair = (key, a), (other, b)
                found[pair if pair in found else pair[::-1]] = result
    return found


def test_every_pair_of_names_is_accepted_warned_or_refused_as_written_by_hand():
    want = expected()
    wrong = {pair: got for pair, got in outcomes().items() if got != want[pair]}
    assert not wrong
    assert len(want) > 1000


def test_every_pair_of_keys_with_an_exception_is_printed():
    keys = {frozenset((a[0], b[0])) for (a, b), got in outcomes().items() if got != "accepted"}
    assert {frozenset(pair) for pair in PRINTED} - keys == set()
    assert keys - {frozenset(pair) for pair in PRINTED} == set()


def test_losses_without_an_exception_go_with_everything():
    """Three choices at a time: the pairs do not hide a rule between three names."""
    losses = [loss for loss in POLICY_LOSSES if loss not in (*EACH_SEQUENCE, "vespo")]
    for loss, advantage, correction in itertools.product(
        losses, ("grpo", "gae", "distill"), CORRECTIONS
    ):
        chosen = dict(policy_loss=loss, advantage=advantage, correction=correction)
        assert outcome(chosen) == "accepted", chosen
    for correction in CORRECTIONS:
        chosen = dict(policy_loss="policy_gradient", correction=correction, old_logp="rollout")
        assert outcome(chosen) == "accepted", chosen


def test_preconditions_name_keys_and_values_that_exist():
    for key, table in PRECONDITIONS.items():
        assert set(table) <= set(NAMES[key])
        for rule in itertools.chain(*table.values()):
            assert set(rule.values) < set(NAMES[rule.key])
    assert set(EVERY_RESPONSE_ADVANTAGE) == set(ADVANTAGES) - set(EACH_TOKEN_ADVANTAGE)
    assert set(PRECONDITIONS["kl"]) == set(KLS) - {"k1+"}, "its value is k1, its gradient k2's"


@pytest.mark.parametrize(
    "project, name",
    [(project, name) for project, presets in CORRECTION_PRESETS.items() for name in presets],
)
def test_a_preset_of_another_project_resolves_without_a_warning(project, name, recwarn):
    keys = {f"algorithm__{key}": value for key, value in CORRECTION_PRESETS[project][name].items()}
    if "algorithm__kl" in keys:
        keys["algorithm__kl_coef"] = 0.1
    resolve(runnable(**keys))
    assert not recwarn.list


@pytest.mark.parametrize("place, estimator", [("reward", "k1"), ("loss", "k3")])
def test_the_default_kl_follows_its_place(place, estimator):
    run = resolve(runnable(algorithm__kl_in=place, algorithm__kl_coef=0.1))
    assert run.algorithm.kl_estimator == estimator
