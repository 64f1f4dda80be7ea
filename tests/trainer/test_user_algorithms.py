"""Runs with rows of the algorithm tables that a user's file defines."""

import pytest

from jaxrl.config import resolve
from jaxrl.train import train
from tests.trainer.test_train import metrics

OWN = """
from jaxrl.algorithms.advantages import ADVANTAGES
from jaxrl.algorithms.losses.aggregation import AGGREGATIONS
from jaxrl.algorithms.losses.policy_loss import POLICY_LOSSES

ADVANTAGE, LOSS = ADVANTAGES["grpo"], POLICY_LOSSES["ppo_clip"]
AGGREGATION = AGGREGATIONS["token_mean"]
"""


@pytest.mark.thorough
def test_rows_of_a_file_train_as_the_same_rows_of_the_tables(tiny_config, tmp_path):
    tiny_config.total_steps = 2
    tiny_config.run_dir = str(tmp_path / "built_in")
    train(resolve(tiny_config))
    (tmp_path / "own.py").write_text(OWN)
    for key, row in (("advantage", "ADVANTAGE"), ("policy_loss", "LOSS")):
        tiny_config.algorithm[key] = f"{tmp_path}/own.py:{row}"
    tiny_config.algorithm.aggregation = f"{tmp_path}/own.py:AGGREGATION"
    tiny_config.run_dir = str(tmp_path / "own")
    train(resolve(tiny_config))
    assert metrics(tmp_path / "own") == metrics(tmp_path / "built_in")


def test_a_row_that_does_not_fit_ends_the_run_before_models_are_read(tiny_config, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    tiny_config.algorithm.policy_loss = f"{tmp_path}/own.py:ADVANTAGE"
    tiny_config.model.path = str(tmp_path / "no_such_model")
    with pytest.raises(ValueError, match=r"own\.py has no PolicyLoss .* 'ADVANTAGE'; .*: LOSS"):
        train(resolve(tiny_config))
