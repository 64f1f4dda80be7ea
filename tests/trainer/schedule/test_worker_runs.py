"""Whole runs with rollout workers, in one process (jaxrl/trainer/setup/workers.py)."""

import pytest

from jaxrl.config import resolve
from jaxrl.rollout.remote.pool import NoWorkers
from jaxrl.train import train
from tests.trainer.test_train import metrics


@pytest.mark.thorough
def test_a_run_that_lost_its_workers_resumes_with_fewer(workers, config):
    config.total_steps, config.eval.every = 3, 0
    workers.n_dispatches = 45
    with pytest.raises(NoWorkers, match=r"0 of 1 .*killed.*lower schedule\.rollout_workers"):
        train(resolve(config))
    n_before = sum("reward/mean" in line for line in metrics(config.run_dir))
    assert 0 < n_before < 3
    workers.n_dispatches = 1 << 30
    config.schedule.rollout_workers, config.schedule.weight_transfer = 1, "delta"
    assert train(resolve(config))
    lines = [line for line in metrics(config.run_dir) if "reward/mean" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["workers/ready"] == 1
    assert all(line["buffer/dropped"] == 0 and line["staleness/max"] <= 1 for line in lines)
