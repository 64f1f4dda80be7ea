"""The wheel that `uv build` makes: its files, and training from it outside a clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MY_CONFIG = """
from jaxrl.config import default_config

def get_config():
    config = default_config()
    config.name = "mine"
    config.total_steps = 1
    config.model.path = "model"
    config.mesh.fsdp = 1
    config.data.train = ("train.jsonl",)
    config.data.chat_template = "chatml"
    config.data.prompts_per_step = 2
    config.data.max_prompt_len = 96
    config.data.max_response_len = 8
    config.rollout.n = 2
    config.rollout.max_num_seqs = 4
    config.rollout.max_num_batched_tokens = 256
    config.learner.token_budget = 256
    config.learner.halvings = 0
    config.reward.functions = ("my_reward.py:score",)
    config.reward.workers = 1
    config.algorithm.policy_loss = "my_loss.py:TOPR"
    return config
"""
ALGORITHMS = (ROOT / "docs" / "reference" / "algorithms.md").read_text()
MY_LOSS = ALGORITHMS.split("```python\n# my_loss.py\n")[1].split("```")[0]
MY_REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"

pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="uv builds the wheel")


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run("uv", "build", "--wheel", "--out-dir", folder, cwd=ROOT)
    return next(folder.glob("*.whl"))


@pytest.mark.thorough
def test_the_wheel_has_every_file_that_a_run_reads(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    listed = run("git", "ls-files", "jaxrl", "sharding", "configs", cwd=ROOT).split()
    assert len(listed) > 200
    placed = {f"jaxrl/{name}" if name.startswith("configs/") else name for name in listed}
    assert not placed - inside
    assert not any(name.startswith("configs/") for name in inside)  # a common name of user folders
    suffixes = {Path(name).suffix for name in inside}
    assert {".py", ".c", ".h", ".jinja", ".json", ".html", ".css", ".js"} <= suffixes


@pytest.mark.slow
def test_training_runs_from_the_wheel_outside_a_clone(wheel, tmp_path, tiny_model):
    """A shipped config and a user's own one, in a fresh environment and another folder."""
    requirements = run(
        *("uv", "export", "--frozen", "--no-default-groups", "--no-emit-project", "--no-hashes"),
        cwd=ROOT,
    )
    (tmp_path / "requirements.txt").write_text(requirements)
    python = tmp_path / "env" / "bin" / "python"
    run("uv", "venv", "--python", sys.executable, tmp_path / "env", cwd=tmp_path)
    run("uv", "pip", "install", "--python", python, "-r", "requirements.txt", wheel, cwd=tmp_path)

    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "my_run.py").write_text(MY_CONFIG)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").touch()  # a package of the user
    (tmp_path / "my_reward.py").write_text(MY_REWARD)
    (tmp_path / "my_loss.py").write_text(MY_LOSS)
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 4)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env |= {"JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    train = (python, "-m", "jaxrl.train")
    shared = ("--config.model.path=model", "--config.total_steps=1", "--config.mesh.fsdp=1")
    shipped = ("--config=configs/quickstart.py", "--config.data.max_prompt_len=96")
    small = (
        *("--config.data.prompts_per_step=2", "--config.data.val_max_samples=2"),
        *("--config.rollout.n=2", "--config.rollout.max_num_seqs=4"),
    )
    run(*train, *shipped, *shared, *small, cwd=tmp_path, env=env)
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
    run(*train, "--config=my_run.py", cwd=tmp_path, env=env)
    assert (tmp_path / "runs" / "mine" / "hf" / "config.json").is_file()
