"""Runs with an agent: exact tokens, branches, resume, evaluation; and the calculator learned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.config.resolve import resolve
from jaxrl.evaluate import evaluate, read
from jaxrl.report.page import page_data
from jaxrl.report.record import read_record
from jaxrl.train import train
from tests.trainer.test_train import assert_same_weights, metrics

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "calculator_agent_smollm2.py"


@pytest.mark.thorough
def test_a_run_with_an_agent_resumes_bitwise_and_evaluates_as_validated(agent_config, tmp_path):
    agent_config.log.trajectories = 4
    assert train(resolve(agent_config))
    uninterrupted = agent_config.run_dir
    lines = [line for line in metrics(uninterrupted) if "optim/grad_norm" in line]
    assert len(lines) == 2
    for line in lines:
        # engine and trainer see the same tokens at the same positions in all conversations
        assert line["mismatch/logp_diff_max"] < 1e-4
        assert line["env/texts"] == 3 or line["env/failures"] > 0
        assert 1 < line["env/branches"] <= 2 and 0 < line["env/own_fraction"] < 1
    validated = [line for line in metrics(uninterrupted) if "val/reward" in line][-1]

    rows = page_data(read_record(Path(uninterrupted)), "")["trajectories"]
    assert len(rows) == 16  # of two steps and two validations
    for row in rows:
        assert row["n_sequences"] == len(row["sequences"]) and row["n_turns"] == 3
        phases = [phase for phase, _, _ in row["spans"]]
        assert phases == ["queue", *["engine"] * 3, "agent"]
        queue, *turns, agent = row["spans"]
        assert queue[2] == agent[1] and turns[-1][2] <= agent[2]

    assert evaluate(read([f"--model={uninterrupted}"]))
    summary = json.loads(Path(uninterrupted, "evaluation", "summary.json").read_text())
    assert summary["results"]["all"]["reward"] == pytest.approx(validated["val/reward"], abs=1e-7)

    agent_config.run_dir = str(tmp_path / "resumed")
    agent_config.total_steps = 1
    assert train(resolve(agent_config))
    agent_config.total_steps = 2
    assert train(resolve(agent_config))
    assert_same_weights(uninterrupted, agent_config.run_dir)


@pytest.mark.slow
def test_an_agent_learns_to_use_its_calculator(tmp_path):
    """Right answers to 32 products of two-digit numbers, sampled at temperature 1."""
    run, n_steps = tmp_path / "run", 8
    command = [sys.executable, "-m", "jaxrl.train", f"--config={CONFIG}"]
    settings = {
        "run_dir": run,
        "total_steps": n_steps,
        "data.val_max_samples": 32,
        "eval.every": n_steps,
        "eval.sampling.temperature": 1.0,
        "checkpoint.every": n_steps,
    }
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    subprocess.run(command, env=env, cwd=ROOT, check=True)
    values = [line["val/env/right"] for line in metrics(run) if "val/env/right" in line]
    assert values[0] < 0.7 and values[-1] >= 0.9
