"""Tests of docs/tutorials: every file and command of a tutorial runs, in the order of its page.

A Python block that starts with "# name.py" is that file. Bash blocks are run with a tiny random
model and short limits. Text blocks are not run.
"""

import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.config.command_line import read_args
from jaxrl.config.config_file import load_config
from jaxrl.config.resolve import resolve

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# (\w+\.py)\n")
ENTRY = re.compile(r"python -m jaxrl\.(\w+)")
SHORT = (  # overrides that make a run of the tiny model take seconds; its tokens are bytes
    "--config.data.prompts_per_step=2",
    "--config.data.val_max_samples=2",
    "--config.data.max_prompt_len=640",
    "--config.data.max_response_len=128",
    "--config.learner.token_budget=1024",
    "--config.learner.buckets=1024",
    "--config.learner.halvings=0",
)
SHORT_ROLLOUT = (
    "--config.rollout.n=2",
    "--config.rollout.max_num_seqs=4",
    "--config.rollout.max_num_batched_tokens=512",
    "--config.reward.workers=1",
    "--config.env.workers=4",
)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block of a page."""
    return BLOCK.findall(page.read_text())


def commands(page: Path) -> list[str]:
    """The lines of a page's bash blocks."""
    return [
        line for kind, text in blocks(page) if kind == "bash" for line in text.splitlines() if line
    ]


def write_files(page: Path, folder: Path) -> list[Path]:
    """Write the files that the page shows to `folder`."""
    written = []
    for kind, text in blocks(page):
        if kind == "python" and (name := FILE_NAME.match(text)):
            written.append(folder / name[1])
            written[-1].write_text(text)
    return written


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_configs_and_arguments_of_a_tutorial_are_valid(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in write_files(page, tmp_path):
        py_compile.compile(str(file), doraise=True)
        if "get_config" in file.read_text():
            resolve(load_config(str(file)))
    assert commands(page)
    for command in commands(page):
        assert command.startswith("uv run python "), command
        if ENTRY.search(command) and "--config" in command:
            config, rest = read_args(command.split()[5:])
            assert not rest or "jaxrl.plan" in command, command
            resolve(config)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory, tiny_model):
    """The tiny model with room for long sequences of bytes."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("long") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


def marked(page: Path):
    """Pages whose runs take minutes are slow, the others thorough."""
    mark = pytest.mark.slow if page.stem in ("quickstart", "sft_then_rl") else pytest.mark.thorough
    return pytest.param(page, id=page.stem, marks=mark)


@pytest.mark.parametrize("page", map(marked, TUTORIALS))
def test_every_command_of_a_tutorial_runs(page, tmp_path, long_model, xla_cache):
    write_files(page, tmp_path)
    n_runs = 0
    for command in commands(page):
        entry = match[1] if (match := ENTRY.search(command)) else ""
        words = command.removeprefix("uv run python ").split()
        if entry in ("train", "sft", "dpo", "plan"):
            words += [*SHORT, *(SHORT_ROLLOUT if entry in ("train", "plan") else ())]
            words.append(f"--config.compilation_cache={xla_cache}")
            if "--config.model.path" not in command:  # else it continues from an earlier run
                words.append(f"--config.model.path={long_model}")
        if entry in ("train", "sft", "dpo"):
            words.append("--config.mesh.fsdp=1")  # a plan is for the devices that it names
            n_runs += 1  # a command that resumes a run has a step to do
            words.append(f"--config.total_steps={n_runs}")
        if entry == "evaluate":
            words.append("--limit=2")
        if words == ["one_step.py"]:  # its argument is another model
            words.append(str(long_model))
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (
            f"{' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
