"""Tests of jaxrl/trainer/schedule/source.py and setup/engines.py: whole runs of the schedules."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import resolve
from jaxrl.engine.api import Request
from jaxrl.train import train
from jaxrl.trainer.phases.sampling import chosen_groups
from jaxrl.trainer.schedule.source import PartialSource
from sharding import make_mesh
from tests.engine.engine_cases import trainer_logps
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
    validations = [
        [line["val/reward"] for line in metrics(run_dir) if "val/reward" in line]
        for run_dir in (folder, tmp_path / "run")
    ]
    assert validations[0] == validations[1] and len(validations[0]) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["async", "partial"])
def test_arrival_order_keeps_the_limit_of_staleness_with_remax_baselines(
    mode, config, tmp_path, monkeypatch
):
    baselines = []

    def recorded(run, collected):
        found = chosen_groups(run, collected)
        baselines.append(found[1])
        return found

    monkeypatch.setattr("jaxrl.trainer.rl_step.chosen_groups", recorded)
    config.total_steps, config.eval.every = 3, 0
    config.algorithm.advantage = "remax"
    run = {"partial": partial, "async": separate}[mode]
    lines = trained(run(config, tmp_path, mode, order="arrival"))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0 <= line["staleness/max"] <= 1 for line in lines)
    assert all(line["buffer/dropped"] == 0 for line in lines)
    assert [len(one) for one in baselines] == [4, 4, 4]  # of each response
    assert all(one[0] == one[1] and one[2] == one[3] for one in baselines)
    everything = [line for line in metrics(tmp_path / mode) if "reward/mean" in line]
    assert all(line["buffer/waited_s"] >= 0 for line in everything)
    if mode == "async":
        assert all(line["rollout/busy_s"] > 0 for line in everything)
        for name in ("perf/rollout_idle_fraction", "perf/training_idle_fraction"):
            assert all(0 <= line[name] <= 1 for line in everything)


@pytest.mark.thorough
def test_logprobs_of_a_response_are_those_of_the_versions_of_its_tokens(
    config, tmp_path, monkeypatch
):
    """Rescores every token with the weights of the version that sampled it."""
    weights, rollouts, take = {}, [], PartialSource.reward

    def recorded(self, run, generated):
        weights[run.core.clock.step] = jax.tree.map(jnp.copy, run.core.state.params)
        scored, found = take(self, run, generated)
        rollouts.extend(one.rollout for one in scored)
        return scored, found

    monkeypatch.setattr(PartialSource, "reward", recorded)
    config.total_steps, config.eval.every, config.learner.lr = 3, 0, 1e-2
    partial(config, tmp_path, "partial")
    scores = {v: rescored(params, rollouts) for v, params in weights.items()}
    n_mixed = 0
    for i, rollout in enumerate(rollouts):
        rows = [scores[version][i][t] for t, version in enumerate(rollout.versions)]
        np.testing.assert_allclose(rollout.behavior_logp, rows, rtol=0, atol=1e-5)
        n_mixed += len(np.unique(rollout.versions)) > 1
    assert n_mixed > 0
    steps = [scores[v][0][: len(rollouts[0].tokens)] for v in (0, 2)]
    assert np.max(np.abs(steps[0] - steps[1])) > 1e-3  # versions differ by more than rounding


def rescored(params, rollouts):
    """Logprobs of the tokens of each response under these weights."""
    requests = [Request(tokens=r.prompt.tokens, max_tokens=1) for r in rollouts]
    results = [(r.tokens, None, "") for r in rollouts]
    with jax.set_mesh(make_mesh()):
        return trainer_logps(params.cfg, params, requests, results)


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
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_async_run_that_skips_solved_prompts_resumes_bitwise(config, tmp_path, dynamic):
    """Rewards of a step count in the draws that are ordered after it."""
    config.data.skip_solved, config.checkpoint.every = 0.5, 2
    if dynamic:  # means above 0.5 are solved or dropped, so steps need further batches
        config.algorithm.dynamic_sampling, config.algorithm.dynamic_sampling_batches = True, 3
        config.algorithm.dynamic_sampling_range = (0.0, 0.5)
    whole = separate(config, tmp_path, "whole")
    config.total_steps = 2
    separate(config, tmp_path, "resumed")
    config.total_steps = 4
    assert_same_weights(whole, separate(config, tmp_path, "resumed"))
    assert max(line["data/solved"] for line in trained(whole)) > 0
    lines = [line for line in metrics(whole) if "reward/mean" in line]
    assert max(line.get("rollout/batches", 0) for line in lines) == (3 if dynamic else 0)


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
