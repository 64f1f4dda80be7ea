"""Runs with the real packages of the trackers and reasoning_gym, offline, as their extras install
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
EXTRAS = ("wandb", "mlflow", "swanlab", "clearml", "trackio", "reasoning-gym")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a new environment with jaxrl and its extras, from uv.lock."""
    venv = tmp_path_factory.mktemp("extras") / "venv"
    command = ["uv", "sync", "--locked", "--quiet", "--no-default-groups", "--inexact"]
    command += [f"--extra={extra}" for extra in EXTRAS]
    env = os.environ | {"UV_PROJECT_ENVIRONMENT": str(venv)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return venv / "bin" / "python"


@pytest.fixture
def config(tiny_config, tmp_path):
    """The tiny run with a reward that needs no test packages."""
    (tmp_path / "letters.py").write_text(LETTERS)
    tiny_config.reward.functions = (f"{tmp_path}/letters.py:share",)
    return tiny_config


def train(python: Path, config, folder: Path, **servers: str) -> str:
    """Runs the training program in `folder`; returns its output.

    It has no network service, except those at the addresses of the variables `servers`.
    """
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "JAX_PLATFORMS": "cpu",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "SWANLAB_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    env |= servers
    command = [str(python), "-m", "jaxrl.train", f"--config={write_config(config, folder)}"]
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    assert servers or "warning" not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_run_logs_to_wandb_and_mlflow_and_learns_from_reasoning_gym(python, config, tmp_path):
    config.log.loggers = ("console", "jsonl", "wandb", "mlflow")
    config.log.project = "a-project"
    config.data.train = ("reasoning_gym:chain_sum?size=16&min_terms=2&max_terms=2",)
    config.data.val = ("reasoning_gym:spell_backward?size=4&seed=1",)
    config.reward.functions = ("reasoning_gym", *config.reward.functions)
    config.total_steps = 2
    train(python, config, tmp_path)
    config.total_steps = 3  # resumes both trackers' runs
    train(python, config, tmp_path)

    run_dir = Path(config.run_dir)
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    sources = {line["source"] for line in lines}
    assert sources == {"reasoning_gym/chain_sum", "reasoning_gym/spell_backward"}
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in metrics if "loss/policy" in line]
    assert steps == [1, 2, 3]
    assert_in_mlflow(tmp_path, metrics)
    assert_in_wandb(run_dir)


@pytest.mark.slow
def test_a_run_logs_to_swanlab_clearml_trackio_and_tensorboard(python, config, tmp_path):
    trackers = ("swanlab", "clearml", "trackio", "tensorboard")
    config.log.loggers = ("console", "jsonl", *trackers)
    config.log.project = "a-project"
    config.total_steps = 2
    train(python, config, tmp_path)
    config.total_steps = 3  # resumes the runs of all trackers
    train(python, config, tmp_path)

    run_dir = Path(config.run_dir)
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss/policy"] for line in metrics if "loss/policy" in line}
    assert list(losses) == [1, 2, 3]
    assert_in_swanlab(run_dir)
    assert_in_clearml(tmp_path, losses)
    assert_in_trackio(tmp_path / "trackio" / "a-project.db", losses)
    events = b"".join(file.read_bytes() for file in (run_dir / "tensorboard").iterdir())
    assert events.count(b"loss/policy") == 3


@pytest.mark.slow
def test_a_run_continues_without_its_trackers_if_their_servers_are_down(python, config, tmp_path):
    nowhere = "http://127.0.0.1:9"  # the discard port: connections are refused
    config.log.loggers = ("console", "jsonl", "mlflow", "trackio")
    config.total_steps = 2
    servers = {"MLFLOW_TRACKING_URI": nowhere, "TRACKIO_SERVER_URL": f"{nowhere}/?write_token=x"}
    out = train(python, config, tmp_path, **servers)
    assert out.count("the logger 'mlflow' does not start") == 1
    run_dir = Path(config.run_dir)
    kept = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    unsent = (run_dir / "unsent_mlflow.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in unsent] == [line["step"] for line in kept]


def assert_in_swanlab(run_dir: Path) -> None:
    """Two offline folders of one run id, with metrics of each."""
    files = sorted((run_dir / "swanlab").glob("run-*/*.swanlab"))
    run_id = (run_dir / "swanlab" / "run_id").read_text()
    assert [file.stem for file in files] == [f"run-{run_id}"] * 2
    assert all(b"loss/policy" in file.read_bytes() for file in files)


def assert_in_clearml(folder: Path, losses: dict[int, float]) -> None:
    """One offline session with all steps, under their own numbers."""
    (session,) = folder.glob(".clearml/cache/offline/offline-*/metrics.jsonl")
    found = [one for line in session.read_text().splitlines() for one in json.loads(line)]
    found = {
        one["iter"]: one["value"]
        for one in found
        if (one.get("metric"), one.get("variant")) == ("loss", "policy")
    }
    assert found == pytest.approx(losses)


def assert_in_trackio(store: Path, losses: dict[int, float]) -> None:
    """One run with all steps."""
    with sqlite3.connect(store) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    values = [(step, json.loads(text)) for _, step, text in rows]
    found = {step: one["loss/policy"] for step, one in values if "loss/policy" in one}
    assert found == pytest.approx(losses)


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
