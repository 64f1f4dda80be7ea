"""Every algorithm table agrees with its functions and with the names in jaxrl/config/choices.py."""

import dataclasses
import inspect

import pytest

from jaxrl.algorithms.advantages import ADVANTAGES
from jaxrl.algorithms.kl import KL_ESTIMATORS
from jaxrl.algorithms.losses.importance import CORRECTIONS
from jaxrl.algorithms.losses.policy_loss import POLICY_LOSSES
from jaxrl.algorithms.losses.rejection import REJECTIONS
from jaxrl.algorithms.table import Row, apply, lookup
from jaxrl.config import choices
from jaxrl.config.keys import AlgorithmConfig

TABLES = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "kl": KL_ESTIMATORS,
    "correction": CORRECTIONS,
    "rejection": REJECTIONS,
}
SELECTIONS = {name: row.selection for name, row in POLICY_LOSSES.items() if row.selection}
ROWS = {
    f"{kind} {name}": row
    for kind, table in (TABLES | {"selection": SELECTIONS}).items()
    for name, row in table.items()
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_names_the_arguments_of_its_function(row: Row):
    parameters = inspect.signature(row.function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    required = {p.name for p in keywords if p.default is p.empty}
    assert list(row.inputs) == positional
    assert required <= set(row.hyper_parameters) <= {p.name for p in keywords}
    fields = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    assert set(row.hyper_parameters) <= fields


@pytest.mark.parametrize("table", [ADVANTAGES, POLICY_LOSSES], ids=["advantages", "policy losses"])
def test_a_function_has_the_name_of_its_row(table):
    assert all(row.function.__name__ == name for name, row in table.items())


def test_the_config_checks_know_the_preconditions_of_the_tables():
    assert set(choices.GROUP_ADVANTAGES) == {n for n, row in ADVANTAGES.items() if row.needs_group}
    token_level = {n for n, row in ADVANTAGES.items() if row.level == "token"}
    assert set(choices.TOKEN_ADVANTAGES) == token_level
    assert {n for n, row in ADVANTAGES.items() if row.needs_critic} == {"gae"}
    assert set(choices.FULL_KLS) == {
        n for n, row in KL_ESTIMATORS.items() if "exact_kl" in row.inputs
    }
    selecting = {n for n, row in POLICY_LOSSES.items() if "selected" in row.inputs}
    assert set(SELECTIONS) == selecting


def test_a_row_is_called_with_its_inputs_and_hyper_parameters():
    cfg = AlgorithmConfig(kl_cov_coef=4.0)

    @dataclasses.dataclass(frozen=True)
    class Scaled:
        function = staticmethod(lambda a, b, *, kl_cov_coef: a - b * kl_cov_coef)
        inputs = ("a", "b")
        hyper_parameters = ("kl_cov_coef",)

    assert apply(Scaled(), {"b": 1.0, "a": 2.0, "c": 9.0}, cfg) == -2.0


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"algorithm\.kl = 'k9' is not known; set one of 'k1'"):
        lookup(KL_ESTIMATORS, "k9", "algorithm.kl")
