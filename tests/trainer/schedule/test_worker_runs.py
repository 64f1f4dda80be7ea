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


@pytest.mark.thorough
def test_updates_replay_the_experts_of_workers_as_those_of_an_engine_in_the_run(
    workers, config, tiny_experts
):
    """The workers' int8 weights choose other experts than training, in one step of one version."""
    config.model.path, config.rollout.dtype = str(tiny_experts), "int8"
    config.total_steps, config.eval.every = 1, 0
    config.learner.router_replay = "R3"
    remote = first_step(config)
    config.schedule.mode, config.schedule.rollout_workers = "sync", 0
    config.run_dir += "_engine"
    local = first_step(config)
    assert remote == pytest.approx(local, rel=1e-5)
    assert 0 < remote["router/changed_fraction"] < 0.5


def first_step(config):
    """The metrics of the rollout and of training with its tokens and experts."""
    assert train(resolve(config))
    [line] = [line for line in metrics(config.run_dir) if "reward/mean" in line]
    kept = ("reward/", "router/", "mismatch/", "loss/", "rollout/response_len")
    return {name: value for name, value in line.items() if name.startswith(kept)}
