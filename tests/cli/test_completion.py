"""Shell completion: the continuations of a command line, and how bash replaces its last word."""

import shutil
import subprocess

import pytest

from jaxrl.cli.commands import COMMANDS
from jaxrl.cli.completion import SCRIPTS, continuations, run


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tr", ["train"]),
        ("completion ", ["bash", "zsh"]),
        ("nothing --", []),
        ("train --config.rollout.samp", ["--config.rollout.sampling."]),
        ("train --config.rollout.sampling.temp", ["--config.rollout.sampling.temperature="]),
        ("train --config.see", ["--config.seed="]),
        ("train --config.check_finite=t", ["--config.check_finite=true"]),
        ("train --config.algorithm.policy_loss=gm", ["--config.algorithm.policy_loss=gmpo"]),
        ("sft --config configs/sft", ["configs/sft_gsm8k.py"]),
        ("sft --config=configs/sft", ["--config=configs/sft_gsm8k.py"]),
        ("evaluate --te", ["--temperature"]),
        ("plan --top", ["--topology"]),
        ("launch --num", ["--num-hosts"]),
        ("serve --max-bodies", ["--max-bodies-mib"]),
        ("convert --max", ["--max-shard-bytes"]),
        ("convert --conf", []),
        ("migrate-config --conf", ["--config."]),
        ("report runs/a", []),  # the shell completes the file
    ],
)
def test_continuations(line, expected):
    assert continuations(line.split(" ")) == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_completes_its_options(name):
    command, found = COMMANDS[name], continuations([name, "--"])
    n_shared = len({*command.config, "--help"})
    assert {*command.config, "--help"} <= set(found)
    assert (len(found) > n_shared) == bool(command.options)


def test_configs_of_the_working_directory_are_offered_with_the_shipped_ones(tmp_path, monkeypatch):
    (tmp_path / "my_run.py").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "more").mkdir()
    monkeypatch.chdir(tmp_path)
    assert continuations(["train", "--config=m"]) == ["--config=more/", "--config=my_run.py"]
    assert "--config=configs/quickstart.py" in continuations(["train", "--config="])


@pytest.mark.parametrize(
    ("line", "found", "replies"),
    [
        (
            "jaxrl train --config=configs/q",
            "--config=configs/quickstart.py",
            "configs/quickstart.py",
        ),
        ("jaxrl train --config.see", "--config.seed=", "--config.seed="),
        ("jaxrl tr", "train", "train"),
        ("jaxrl plan --topology=v5p:", "--topology=v5p:4x4x4", "4x4x4"),
    ],
)
def test_bash_replaces_what_follows_its_last_word_break(line, found, replies):
    script = f"""{SCRIPTS["bash"]}
jaxrl() {{ echo '{found}'; }}
COMP_WORDBREAKS=$' \\t\\n"><=;|&(:' COMP_LINE='{line}' COMP_POINT={len(line)}
_jaxrl jaxrl
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == replies, done.stderr


ZSH_STUBS = """
compdef() { print compdef $@ }
compadd() { print compadd ${(P)@[-1]} }
compset() { print compset }
_files() { print files }
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize("source", ["eval", "fpath"])
@pytest.mark.parametrize(
    ("found", "added"),
    [
        ("train", ["compadd", "compadd train"]),
        ("--config.seed= configs/", ["compadd --config.seed= configs/", "compadd"]),
        ("", ["compset", "files"]),
    ],
)
def test_zsh_adds_the_continuations_or_the_names_of_files(source, found, added):
    script = SCRIPTS["zsh"]
    if source == "fpath":  # a file of this name is its function
        script = f"_jaxrl() {{ {script} }}"
    words = "words=(jaxrl train --config=a after) CURRENT=3"
    program = f"jaxrl() {{ [[ $3 == train && $# == 4 ]] && print -l -- {found} }}"
    call = f"{ZSH_STUBS}\n{program}\n{words}\n{script}\n_jaxrl"
    done = subprocess.run(["zsh", "-f", "-c", call], capture_output=True, text=True)
    declared = ["compdef _jaxrl jaxrl"] if source == "eval" else []
    assert done.stdout.splitlines() == declared + added, done.stderr


def test_an_unknown_shell_prints_the_usage(capsys):
    assert run(["fish"]) == 1
    assert "jaxrl completion bash" in capsys.readouterr().err
