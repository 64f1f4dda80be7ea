"""Tests of jaxrl/trainer/schedule/source.py and setup/source.py: whole runs of the schedules."""

import time

import numpy as np
import pytest

from jaxrl.config import resolve
from jaxrl.train import train
from tests.trainer.test_train import (
    assert_same_weights,
    finish_process,
    metrics,
    start_process,
    wait_for_step,
)

CLOCK = ("buffer/waited_s", "perf/rollout_idle_fraction", "perf/training_idle_fraction")


def partial(config, tmp_path, name, mode="partial", **keys):
    """Trains with responses that outlive updates. Returns the run folder."""
    config.run_dir = str(tmp_path / name)
    config.schedule.mode = mode
    config.schedule.update(keys)
    assert train(resolve(config))
    return config.run_dir


def separate(config, tmp_path, name, **keys):
    """Trains on one device and generates on another. Returns the run folder."""
    return partial(config, tmp_path, name, "async", rollout_devices=1, **keys)


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
            if name in sampled or not (name in CLOCK or name.startswith("rollout/"))
        }
        for line in lines
    ]


@pytest.mark.thorough
@pytest.mark.bitwise
@pytest.mark.parametrize("mode", ["async", "partial"])
def test_without_staleness_a_schedule_gives_the_weights_of_sync(mode, config, tmp_path):
    config.total_steps = 2
    assert train(resolve(config))
    sync = trained(tmp_path / "run")
    run = {"partial": partial, "async": separate}[mode]
    folder = run(config, tmp_path, mode, max_staleness=0)
    assert_same_weights(tmp_path / "run", folder)
    lines = trained(folder)
    assert all(line["staleness/max"] == 0 for line in lines)
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


@pytest.mark.thorough
@pytest.mark.bitwise
def test_a_resumed_async_run_is_bitwise_equal_to_an_uninterrupted_one(config, tmp_path):
    config.checkpoint.every = 2
    whole = separate(config, tmp_path, "whole", max_staleness=2)
    config.total_steps = 2
    separate(config, tmp_path, "resumed")
    config.total_steps = 4
    resumed = separate(config, tmp_path, "resumed")
    assert_same_weights(whole, resumed)
    assert trained(whole) == trained(resumed)
    lines = trained(whole)
    assert max(line["staleness/max"] for line in lines) == 2
    assert max(line["rollout/versions_per_response"] for line in lines) > 1
    assert any("val/reward" in line for line in metrics(whole)[2:-1])


@pytest.mark.slow
def test_an_async_run_that_skips_solved_prompts_resumes_bitwise(config, tmp_path):
    """Rewards of a step count in the draws that are ordered after it."""
    config.data.skip_solved, config.checkpoint.every = 0.5, 2
    whole = separate(config, tmp_path, "whole")
    config.total_steps = 2
    separate(config, tmp_path, "resumed")
    config.total_steps = 4
    assert_same_weights(whole, separate(config, tmp_path, "resumed"))
    assert max(line["data/solved"] for line in trained(whole)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["partial", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_random_moments_resumes_bitwise(config, tmp_path, mode, seed):
    random, n_devices = np.random.default_rng(seed), 2 if mode == "async" else 1
    config.total_steps, config.checkpoint.every = 8, 1
    config.schedule.mode = mode
    config.schedule.rollout_devices = n_devices - 1
    config.schedule.max_staleness = n_devices
    config.schedule.keep_kv = bool(seed % 2)
    finish_process(config, tmp_path, n_devices=n_devices)
    whole = config.run_dir
    config.run_dir = str(tmp_path / "killed")
    for step in np.sort(random.choice(np.arange(1, 7), 2, replace=False)):
        process = start_process(config, tmp_path, n_devices=n_devices)
        wait_for_step(config.run_dir, step, process)
        time.sleep(random.uniform(0.0, 0.5))
        process.kill()
        process.wait()
    finish_process(config, tmp_path, n_devices=n_devices)
    assert_same_weights(whole, config.run_dir)
    assert trained(whole) == trained(config.run_dir)
