"""Tests of python -m jaxrl.migrate: its options, its exit status, its messages."""

import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from jaxrl.config.config_file import load_config
from jaxrl.migrate.__main__ import main

SCRIPT = """\
set -x
MODEL=${MODEL:-$ROOT/model}
N=$(nproc)
ray start --head
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \\
    algorithm.adv_estimator=grpo data.train_files=$HOME/train.parquet \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 trainer.experiment_name=n_$N $@
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("ROOT", raising=False)
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


def test_a_missing_variable_ends_with_status_1_and_says_how_to_give_it(script, capsys):
    assert main([str(script)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error: actor_rollout_ref.model.path=${ROOT}/model: ROOT is not set" in printed.err
    assert (
        "--set ROOT=VALUE" in printed.err and "no config is written: 1 error above" in printed.err
    )


def test_a_variable_is_given_by_the_environment_or_by_set(script, capsys, monkeypatch):
    output = script.with_name("mine.py")
    assert main([str(script), "--set", "ROOT=/r", f"--output={output}"]) == 0
    config: Any = load_config(str(output))
    assert config.model.path == "/r/model" and config.data.train == ("/home/me/train.parquet",)
    assert "needs a decision: trainer.experiment_name=n_${N}" in capsys.readouterr().err
    assert "# trainer.experiment_name=n_${N}" in output.read_text()
    monkeypatch.setenv("MODEL", "hub/model")
    assert main([str(script), "--set", "N=4"]) == 0
    printed = capsys.readouterr()
    assert 'config.model.path = "hub/model"' in printed.out
    assert 'config.name = "n_4"' in printed.out
    assert "the config passes jaxrl's checks; run it: python -m jaxrl.train" in printed.err


def test_settings_keys_and_arguments_are_added(script, capsys):
    further = ["actor_rollout_ref.model.path=m", "--config.rollout.tensor=2"]
    assert main([str(script), *further, "--", "actor_rollout_ref.rollout.n=4"]) == 0
    printed = capsys.readouterr().out
    assert "config.rollout.n = 4" in printed and "config.rollout.tensor = 2" in printed
    settled = ["--config.model.path=m", "data.image_key=images", "~data.image_key"]
    assert main([str(script), *settled]) == 0


def test_a_config_that_breaks_a_rule_is_not_written(script, capsys):
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=100"
    assert main([str(script), "--set=ROOT=/r", mini]) == 1
    printed = capsys.readouterr()
    assert (
        printed.out == "" and "error: learner.mini_batch_prompts=100 does not divide" in printed.err
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.sh", "ls\n", "no command of verl or openrlhf or trl is in it"),
        ("a.sh", "echo 'x\n", "line 1: ' is never closed"),
        ("a.yaml", "a: 1\n", "it has no key of verl such as data.train_files"),
        ("a.yaml", "[1]\n", "not a YAML mapping"),
        ("a.yaml", "model_name_or_path: m\n", "does not say which trainer it is for"),
        ("a.yaml", "model_name_or_path: m\ntrainer: ppo\n", "does not say which trainer it is for"),
        ("a.py", "print(1)\n", "a Python script is read for TRL only"),
        ("a.sh", "python -m verl.trainer.main_eval data.path=x\n", "does not train"),
    ],
)
def test_a_file_without_a_run_is_an_error(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_text(content)
    assert main([str(tmp_path / name)]) == 1
    assert message in capsys.readouterr().err
    assert main([str(tmp_path / "none.sh")]) == 1


def test_two_commands_that_train_are_refused_with_what_decides(tmp_path, capsys):
    command = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path="
    text = f"if [ $(probe) = 1 ]; then\n{command}a\nelse\n{command}b\nfi\n"
    (tmp_path / "a.sh").write_text(text)
    assert main([str(tmp_path / "a.sh")]) == 1
    assert "2 commands that train, on lines 2, 4" in capsys.readouterr().err


def test_a_yaml_file_named_by_the_command_is_read_below_its_settings(tmp_path, capsys):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "data: {train_files: a.parquet, max_prompt_length: 256}\n"
        "actor_rollout_ref: {model: {path: m}, rollout: {n: 4, response_length: 7}}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "trainer: {project_name: p, experiment_name: '${trainer.project_name}_x'}\n"
    )
    command = "python -m verl.trainer.main_ppo --config-path=config --config-name=mine"
    (tmp_path / "a.sh").write_text(f"{command} actor_rollout_ref.rollout.n=16\n")
    assert main([str(tmp_path / "a.sh")]) == 0
    printed = capsys.readouterr().out
    assert "config.rollout.n = 16" in printed and "max_prompt_len = 256" in printed
    assert 'config.name = "p_x"' in printed
    (tmp_path / "a.sh").write_text(f"{command}_other actor_rollout_ref.rollout.n=16\n")
    assert main([str(tmp_path / "a.sh")]) == 1
    assert "mine_other.yaml is not there, so its settings are not read" in capsys.readouterr().err


def test_the_example_of_the_page_is_what_is_printed(tmp_path, capsys):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "how_to" / "migrating.md").read_text()
    script = re.search(r"```text\n(python3 -m verl.*?)```", page, re.DOTALL)
    config = re.search(r"```python\n# my_grpo.py\n(.*?)```", page, re.DOTALL)
    assert script and config
    (tmp_path / "run.sh").write_text(script[1])
    assert main([str(tmp_path / "run.sh")]) == 0
    assert capsys.readouterr().out.endswith(config[1])


def test_the_program_needs_no_jax():
    code = "import sys, jaxrl.migrate.__main__; assert not {'jax', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
