"""A run with the real packages wandb, mlflow and reasoning_gym, offline, as their extras install
them. The other tests replace them."""

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.runtime.hosts.process_group import write_config

ROOT = Path(__file__).parents[2]
# A random model solves nothing; this reward differs between its samples.
LETTERS = """
def share(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isalpha() for c in solution_str) / 8
"""
EXTRAS = ("wandb", "mlflow", "reasoning-gym")


@pytest.fixture
def python(tmp_path):
    """The interpreter of a new environment with jaxrl and its extras, from uv.lock."""
    venv = tmp_path / "venv"
    command = ["uv", "sync", "--locked", "--quiet", "--no-default-groups", "--inexact"]
    command += [f"--extra={extra}" for extra in EXTRAS]
    env = os.environ | {"UV_PROJECT_ENVIRONMENT": str(venv)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return venv / "bin" / "python"


def train(python: Path, config, folder: Path) -> str:
    """Runs the training program in `folder`, without a network service; returns its output."""
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "JAX_PLATFORMS": "cpu",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    command = [str(python), "-m", "jaxrl.train", f"--config={write_config(config, folder)}"]
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_run_logs_to_wandb_and_mlflow_and_learns_from_reasoning_gym(
    python, tiny_config, tmp_path
):
    tiny_config.log.loggers = ("console", "jsonl", "wandb", "mlflow")
    tiny_config.log.project = "a-project"
    tiny_config.data.train = ("reasoning_gym:chain_sum?size=16&min_terms=2&max_terms=2",)
    tiny_config.data.val = ("reasoning_gym:spell_backward?size=4&seed=1",)
    (tmp_path / "letters.py").write_text(LETTERS)
    tiny_config.reward.functions = ("reasoning_gym", f"{tmp_path}/letters.py:share")
    tiny_config.total_steps = 2
    train(python, tiny_config, tmp_path)
    tiny_config.total_steps = 3  # resumes both trackers' runs
    train(python, tiny_config, tmp_path)

    run_dir = Path(tiny_config.run_dir)
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    sources = {line["source"] for line in lines}
    assert sources == {"reasoning_gym/chain_sum", "reasoning_gym/spell_backward"}
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in metrics if "loss/policy" in line]
    assert steps == [1, 2, 3]
    assert_in_mlflow(tmp_path, metrics)
    assert_in_wandb(run_dir)


def assert_in_mlflow(folder: Path, metrics: list[dict]) -> None:
    """One run with all steps in MLflow's default store, a SQLite file in the working directory."""
    with sqlite3.connect(folder / "mlflow.db") as store:
        assert store.execute("select name from experiments where name = 'a-project'").fetchall()
        assert store.execute("select status from runs").fetchall() == [("FINISHED",)]
        found = store.execute("select step, value from metrics where key = 'loss/policy'")
        expected = {line["step"]: line["loss/policy"] for line in metrics if "loss/policy" in line}
        assert len(expected) == 3
        assert dict(found.fetchall()) == pytest.approx(expected)
        params = dict(store.execute("select key, value from params").fetchall())
        assert params["data.prompts_per_step"] == "4"
    assert list((folder / "mlruns").rglob("samples/train_*.md"))


def assert_in_wandb(run_dir: Path) -> None:
    """Two offline folders of one run id, with metrics of each."""
    files = sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    run_id = (run_dir / "wandb" / "run_id").read_text()
    assert [file.stem for file in files] == [f"run-{run_id}"] * 2
    missing = [file for file in files if b"loss/policy" not in file.read_bytes()]
    assert not missing
