"""Runs of two processes on prompts with images: the numbers of one process."""

import pytest

from tests.runtime.hosts.process_group import assert_close, assert_same_run, metrics
from tests.trainer.conftest import image_config, vlm

__all__ = ["image_config", "vlm"]


@pytest.fixture
def config(image_config):
    """One step on one device of each process."""
    image_config.total_steps = 1
    image_config.mesh.fsdp = 2
    image_config.learner.token_budget = 128
    image_config.learner.eps = 1e-4  # Adam must not amplify gradients that are rounding errors
    image_config.rollout.max_num_seqs = 8
    return image_config


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("freeze", "engines"), [("all", "process"), ("none", "process"), ("all", "mesh")]
)
def test_two_processes_give_the_numbers_of_one(start_group, config, tmp_path, freeze, engines):
    """With an engine in each, a process has its tower, which follows training's."""
    config.model.freeze_vision = freeze
    config.eval.every = 1
    start_group(config, n=1, n_devices=2).finish()
    reference = config.run_dir
    config.run_dir, config.rollout.engines = str(tmp_path / "two"), engines
    first, _ = start_group(config, n=2, n_devices=1).finish()
    assert "in 2 processes" in first
    assert_same_run(config.run_dir, reference)


@pytest.mark.slow
def test_rollout_workers_of_two_processes_give_the_weights_of_their_engines(
    start_group, config, tmp_path
):
    """With one worker, the second process generates nothing."""
    config.total_steps = 3
    config.schedule.mode, config.schedule.rollout_devices = "async", 1
    start_group(config, n=2, n_devices=2).finish()
    local = config.run_dir
    config.schedule.rollout_devices = 0
    for n_workers in (1, 2):
        config.run_dir = str(tmp_path / f"{n_workers}_workers")
        config.schedule.rollout_workers = n_workers
        program = "tests.trainer.schedule.local_workers"
        start_group(config, n=2, n_devices=1, program=program).finish()
        assert_close(config.run_dir, local, atol=0)
        lines = [line for line in metrics(config.run_dir) if "workers/ready" in line]
        assert [line["workers/ready"] for line in lines] == [n_workers] * 3
