"""The command `jaxrl`: its table of programs, and what it imports before one of them starts."""

import pathlib
import subprocess
import sys

import pytest

from jaxrl.cli import main
from jaxrl.cli.commands import COMMANDS

ROOT = pathlib.Path(__file__).parents[2]
LIGHT = """
import sys
from jaxrl.cli.main import run
assert run(["--help"]) == 0
assert not {"jax", "numpy", "ml_collections", "rich"} & set(sys.modules), "--help is heavy"
for words in (["tr"], ["train", "--config.algorithm.pol"], ["serve", "--ma"], ["plan", "--sch"]):
    assert run(["completion", "words", *words]) == 0
assert "jax" not in sys.modules, "completion imports JAX"
"""


def test_every_program_is_a_command():
    files = [*ROOT.glob("jaxrl/*.py"), *ROOT.glob("jaxrl/*/__main__.py")]
    starts = [path for path in files if 'if __name__ == "__main__":' in path.read_text()]
    names = {
        "jaxrl." + (path.parent.name if path.stem == "__main__" else path.stem) for path in starts
    }
    assert {command.module for command in COMMANDS.values()} == names


def test_a_command_replaces_the_process_by_its_program(monkeypatch):
    started = []
    monkeypatch.setattr(main.os, "execv", lambda *args: started.append(args))
    main.run(["reward-model", "--config=my.py", "--config.seed=1"])
    words = [sys.executable, "-m", "jaxrl.reward_model", "--config=my.py", "--config.seed=1"]
    assert started == [(sys.executable, words)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluat"], "there is no command evaluat; did you mean evaluate?"),
        (["check_model", "m"], "did you mean check-model?"),
        (["xyz"], "there is no command xyz; `jaxrl --help` lists the commands"),
        (["--config=a.py", "--x"], "did you mean `jaxrl train --config=a.py --x`?"),
    ],
)
def test_an_unknown_command_names_the_nearest(words, message, capsys):
    assert main.run(words) == 1
    assert message in capsys.readouterr().err


def test_help_and_completion_import_no_jax_and_help_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name, command in COMMANDS.items():
        assert any(line.split() == [name, *command.summary.split()] for line in lines), name
    assert {"train", "--config.algorithm.policy_loss=", "--max-len", "--schedule"} <= set(lines)


def test_the_version_is_that_of_the_package(capsys):
    assert main.run(["--version"]) == 0
    pyproject = (ROOT / "pyproject.toml").read_text()
    version = capsys.readouterr().out.removeprefix("jaxrl ").strip()
    assert f'\nversion = "{version}"\n' in pyproject
