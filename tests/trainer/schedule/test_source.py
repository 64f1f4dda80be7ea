"""Tests of jaxrl/trainer/schedule/source.py and setup/source.py: whole runs of the schedules."""

import time

import numpy as np
import pytest

from jaxrl.config import resolve
from jaxrl.train import train
from jaxrl.trainer.setup.source import check_processes
from sharding import hosts
from tests.trainer.test_train import (
    assert_same_weights,
    finish_process,
    metrics,
    start_process,
    wait_for_step,
)


@pytest.fixture
def config(tiny_config):
    """The tiny config with responses of several dispatches, which differ in length."""
    tiny_config.data.max_response_len = 16
    tiny_config.data.prompts_per_step = tiny_config.rollout.n = 2
    tiny_config.rollout.steps_per_dispatch = 2
    tiny_config.rollout.max_num_seqs = 4
    tiny_config.eval.every = 2
    return tiny_config


def partial(config, tmp_path, name, **keys):
    """Trains with responses that outlive updates. Returns the run folder."""
    config.run_dir = str(tmp_path / name)
    config.schedule.mode = "partial"
    config.schedule.update(keys)
    assert train(resolve(config))
    return config.run_dir


def trained(run_dir):
    """The lines of training steps, without the clock and the engine's cache.

    A resumed run does not have the pages of the validation before it.
    """
    lines = [line for line in metrics(run_dir) if "reward/mean" in line]
    sampled = ("rollout/versions_per_response", "rollout/entropy", "rollout/response_len")
    return [
        {
            name: value
            for name, value in line.items()
            if name in sampled or (name != "buffer/waited_s" and "rollout/" not in name)
        }
        for line in lines
    ]


@pytest.mark.bitwise
def test_partial_without_staleness_gives_the_weights_of_sync(config, tmp_path):
    assert train(resolve(config))
    folder = partial(config, tmp_path, "partial", max_staleness=0)
    assert_same_weights(tmp_path / "run", folder)
    lines = trained(folder)
    assert all(line["staleness/max"] == 0 for line in lines)
    sync = trained(tmp_path / "run")
    assert [line["loss/total"] for line in lines] == [line["loss/total"] for line in sync]


@pytest.mark.thorough
@pytest.mark.bitwise
def test_a_resumed_partial_run_is_bitwise_equal_to_an_uninterrupted_one(config, tmp_path):
    whole = partial(config, tmp_path, "whole")
    config.total_steps = 2
    partial(config, tmp_path, "resumed")
    config.total_steps = 4
    resumed = partial(config, tmp_path, "resumed")
    assert_same_weights(whole, resumed)
    assert trained(whole) == trained(resumed)
    lines = trained(whole)
    assert max(line["staleness/max"] for line in lines) == 1
    assert max(line["rollout/versions_per_response"] for line in lines) > 1
    assert any("val/reward" in line for line in metrics(whole)[2:-1])


def test_several_processes_are_refused(config, monkeypatch):
    config.schedule.mode = "partial"
    monkeypatch.setattr(hosts, "n_processes", lambda: 2)
    with pytest.raises(hosts.AgreedError, match=r"mode='partial' runs in one process.*are 2"):
        check_processes(resolve(config))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_partial_run_killed_at_random_moments_resumes_bitwise(config, tmp_path, seed):
    random = np.random.default_rng(seed)
    config.total_steps, config.checkpoint.every = 8, 1
    config.schedule.mode = "partial"
    config.schedule.keep_kv = bool(seed % 2)
    finish_process(config, tmp_path)
    whole = config.run_dir
    config.run_dir = str(tmp_path / "killed")
    for step in np.sort(random.choice(np.arange(1, 7), 2, replace=False)):
        process = start_process(config, tmp_path)
        wait_for_step(config.run_dir, step, process)
        time.sleep(random.uniform(0.0, 0.5))
        process.kill()
        process.wait()
    finish_process(config, tmp_path)
    assert_same_weights(whole, config.run_dir)
    assert trained(whole) == trained(config.run_dir)
