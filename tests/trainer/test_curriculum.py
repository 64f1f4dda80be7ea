"""Runs whose prompts are drawn from pools of difficulty (data.pool_weights)."""

import json

import numpy as np
import pytest

from jaxrl.config import resolve
from jaxrl.train import train
from tests.trainer.test_train import metrics


def passes(data_source, solution_str, ground_truth, extra_info=None):
    """1 if the first 8 characters have as many letters as the row asks for."""
    return float(letters(data_source, solution_str, ground_truth) >= int(ground_truth) / 8)


def letters(data_source, solution_str, ground_truth, extra_info=None):
    """The skill that all rows need: the share of letters."""
    return sum(c.isalpha() for c in solution_str[:8]) / 8


def trained(run_dir):
    return [line for line in metrics(run_dir) if "reward/mean" in line]


@pytest.fixture
def mixed_task(tiny_config, tmp_path):
    """24 rows that every response passes, 24 that none does at first, and 16 in between."""
    needed = [0] * 24 + [8] * 24 + [2, 3, 4, 5] * 4
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Row {i}", "answer": str(k)} for i, k in enumerate(needed)]
    path.write_text("\n".join(map(json.dumps, rows)))
    tiny_config.data.train = (str(path),)
    tiny_config.reward.functions = (f"{__file__}:passes", f"{__file__}:letters")
    tiny_config.reward.weights = (1.0, 0.0)
    tiny_config.data.prompts_per_step = 8
    return tiny_config


@pytest.mark.thorough
def test_a_run_with_pools_resumes_bitwise(mixed_task, tmp_path):
    config = mixed_task
    config.data.prompts_per_step, config.rollout.n, config.total_steps = 4, 2, 4
    config.data.val, config.checkpoint.every = (), 2
    config.data.pool_weights, config.data.pool_memory = (0.25, 0.5, 0.25), 0.0
    assert train(resolve(config))
    whole = config.run_dir
    config.run_dir, config.total_steps = str(tmp_path / "resumed"), 2
    assert train(resolve(config))
    config.total_steps = 4
    assert train(resolve(config))
    assert trained(whole) == trained(config.run_dir)
    last = trained(whole)[-1]
    pools = [last[f"data/{name}"] for name in ("hard", "right", "easy", "unrated")]
    assert sum(pools) == 64 and pools[3] >= 64 - 4 * 4
    assert pools[0] > 0 and pools[2] > 0


@pytest.mark.slow
def test_pools_learn_a_mixed_task_in_fewer_steps_than_uniform_sampling(mixed_task, tmp_path):
    """Prints the curves: mean share of letters in 64 sampled validation responses."""
    config = mixed_task
    config.total_steps, config.eval.every = 32, 4
    config.data.val_max_samples, config.eval.n = 8, 8
    config.data.val = config.data.train
    config.eval.sampling.temperature = 1.0
    config.learner.lr = 5e-3
    curves: dict[tuple, list] = {}
    for weights in ((), (0.1, 0.8, 0.1)):
        for seed in (0, 1):
            config.data.pool_weights, config.seed = weights, seed
            config.run_dir = str(tmp_path / f"{len(weights)}_{seed}")
            assert train(resolve(config))
            lines = metrics(config.run_dir)
            curves[weights, seed] = [
                m["val/reward/letters"] for m in lines if "val/reward/letters" in m
            ]
            idle = [m["perf/idle_fraction"] for m in lines if "perf/idle_fraction" in m]
            print(weights, seed, np.round(curves[weights, seed], 3), "idle", np.mean(idle))
    for seed in (0, 1):
        assert curves[(0.1, 0.8, 0.1), seed][-1] > curves[(), seed][-1]
