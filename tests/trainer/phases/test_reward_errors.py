"""Tests of jaxrl/trainer/phases/rewards.py and of runs that end with an error (loop.py,
checkpointing.py)."""

import dataclasses
import json
import re
import types
from pathlib import Path

import numpy as np
import pytest

from jaxrl.config import resolve
from jaxrl.evaluate import evaluate, read
from jaxrl.train import train
from jaxrl.trainer.core import Run
from jaxrl.trainer.loop import exit_status
from jaxrl.trainer.phases.rewards import MAX_WARNINGS, RewardErrors, RewardsFailed, kind_of
from jaxrl.trainer.rl_step import check_rewards
from jaxrl.types import Episode, Prompt, Reward, Rollout, ScoredRollout
from tests.trainer.test_train import assert_same_weights, metrics


def scored(*errors, episode=None):
    """Responses with these reward errors; "" is a success."""
    messages = ({"role": "user", "content": "q"},)
    prompt = Prompt(id=0, messages=messages, tokens=np.zeros(3, np.int32), answer="1", source="s")
    tokens, logp, mask = np.zeros(4, np.int32), np.zeros(4, np.float32), np.ones(4, bool)
    rollout = Rollout(
        prompt, 0, tokens, logp, mask, versions=tokens, finish="stop", text="", episode=episode
    )
    return [ScoredRollout(rollout, Reward(0.0, {}, error)) for error in errors]


def test_the_run_stops_when_more_than_the_fraction_failed():
    errors = RewardErrors(0.5)
    errors.check(scored("KeyError: 'x'", ""), "step 1")  # half is not more than half
    errors.check([], "step 2")
    message = (
        "step 3: the rewards of 2 of 3 responses failed, more than "
        "config.reward.max_error_fraction=0.5 allows. First error: KeyError: 'x'. Correct the "
        "reward function, the environment or the data, then resume the run; or set "
        "config.reward.max_error_fraction=1.0 to train on the other responses (see "
        "config.reward.on_error)"
    )
    with pytest.raises(RewardsFailed, match=re.escape(message)):
        errors.check(scored("KeyError: 'x'", "", "timeout"), "step 3")


def test_the_fractions_0_and_1():
    RewardErrors(1.0).check(scored("a", "b"), "step 1")
    RewardErrors(0.0).check(scored("", ""), "step 1")
    with pytest.raises(RewardsFailed):
        RewardErrors(0.0).check(scored("a", *[""] * 99), "step 1")


def test_failed_environments_count():
    failed = scored("", episode=Episode(error="RuntimeError: out of cheese"))
    with pytest.raises(RewardsFailed, match="First error: RuntimeError: out of cheese"):
        RewardErrors(0.5).check(failed, "step 1")


def test_each_kind_of_error_is_reported_once(capsys):
    errors = RewardErrors(1.0)
    errors.check(scored("", "f: KeyError: 'a'", "f: KeyError: 'b'"), "step 1")
    assert capsys.readouterr().out == (
        "warning: step 1: the rewards of 2 of 3 responses failed. First error: f: KeyError: 'a'. "
        "More in samples.jsonl; each kind of error is reported once\n"
        "  response: ''\n  row 1 of the data: data_source 's', answer '1'\n"
    )
    errors.check(scored("f: KeyError: 'c'"), "step 2")
    assert capsys.readouterr().out == ""
    errors.check(scored("f: KeyError: 'c'", "f: \x1b[31mValueError"), "step 3")
    out = capsys.readouterr().out
    assert "step 3: the rewards of 2 of 2 responses failed. First error: f: " in out
    assert "\x1b" not in out
    for i in range(2 * MAX_WARNINGS):
        errors.check(scored("x" * i), f"step {i}")
    assert capsys.readouterr().out.count("warning") <= MAX_WARNINGS


def test_an_error_is_shown_with_its_lines_the_response_and_the_row(capsys):
    [failed] = scored("f: KeyError: 'boxed'\n  File \"r.py\", line 7, in f\n    return p['boxed']")
    prompt = dataclasses.replace(failed.rollout.prompt, id=11, extra={"index": 3, "level": 1})
    rollout = dataclasses.replace(failed.rollout, prompt=prompt, text="I think " + "x" * 400)
    with pytest.raises(RewardsFailed) as raised:
        RewardErrors(0.0, in_file=False).check([ScoredRollout(rollout, failed.reward)], "step 1")
    out = capsys.readouterr().out
    assert "First error: f: KeyError: 'boxed'. Each kind of error is reported once\n" in out
    assert "samples.jsonl" not in out  # the run writes none
    for text in (out, str(raised.value)):
        assert (
            "\n  File \"r.py\", line 7, in f\n    return p['boxed']\n  response: 'I think xx"
            in text
        )
        assert "row 12 of the data: data_source 's', answer '1'; extra_info: index, level" in text


def test_samples_are_logged_before_their_errors_end_the_run():
    logged = []
    core = types.SimpleNamespace(log_samples=lambda *a, kind: logged.append((*a, kind)))
    run = object.__new__(Run)
    object.__setattr__(run, "core", core)
    object.__setattr__(run, "reward_errors", RewardErrors(0.5))
    rollouts = scored("a", "b", "")
    check_rewards(run, rollouts[2:], "step 3", step=3, kind="train")
    assert not logged  # the end of the step logs them
    with pytest.raises(RewardsFailed, match="step 3: the rewards of 2 of 3"):
        check_rewards(run, rollouts, "step 3", step=3, kind="train")
    [(step, found, kind)] = logged
    assert (step, kind) == (3, "train") and [one.error for one in found] == ["a", "b", ""]


def test_errors_of_one_kind_differ_in_numbers_and_quoted_texts():
    assert kind_of("no answer within 10 s") == kind_of("no answer within 7 s")
    assert kind_of("KeyError: 'abc'") == kind_of("KeyError: 'd'")
    assert kind_of("KeyError: 'abc'") != kind_of("ValueError: 'abc'")


REWARDS = """
import os

if os.path.exists({flag!r}):
    raise ImportError("the module is broken")


def failing(data_source, solution_str, ground_truth, extra_info=None):
    if os.path.exists({flag!r} + "2"):
        raise KeyError("no such column")
    return length(solution_str)


def dying(data_source, solution_str, ground_truth, extra_info=None):
    # 6 validation samples, 2 steps of 16 samples, then the third step
    with open({calls!r}, "a") as file:
        file.write("x")
    if os.path.getsize({calls!r}) == 6 + 2 * 16 + 5:
        open({flag!r}, "w").close()
        os._exit(3)
    return length(solution_str)


def failing_later(data_source, solution_str, ground_truth, extra_info=None):
    with open({calls!r}, "a") as file:
        file.write("x")
    if os.path.getsize({calls!r}) > 6 + 2 * 16 and not os.path.exists({flag!r} + "3"):
        raise KeyError("no such column")
    return length(solution_str)


def length(solution_str):
    return sum(c.isalpha() for c in solution_str) / 8
"""


@pytest.fixture
def rewards(tmp_path):
    """Prefix of the reward functions above."""
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS.format(flag=str(tmp_path / "flag"), calls=str(tmp_path / "calls")))
    return f"{path}:"


@pytest.mark.thorough
def test_a_reward_that_always_fails_ends_the_run_at_the_first_validation(
    tiny_config, tmp_path, rewards, capsys
):
    tiny_config.reward.functions = (rewards + "failing",)
    (tmp_path / "flag2").touch()
    assert exit_status(train, resolve(tiny_config)) == 1
    shown = capsys.readouterr()
    assert "warning: validation after step 0: the rewards of 6 of 6" in shown.out
    assert "error: validation after step 0: the rewards of 6 of 6 responses failed" in shown.err
    assert "KeyError: 'no such column'" in shown.err and "Traceback" not in shown.err
    assert Path(tiny_config.run_dir, "checkpoints/0").is_dir()

    (tmp_path / "flag2").unlink()
    tiny_config.total_steps = 1
    assert exit_status(train, resolve(tiny_config)) == 0
    assert [line["step"] for line in metrics(tiny_config.run_dir) if "val/reward" in line] == [0, 1]


@pytest.mark.thorough
@pytest.mark.parametrize("function", ["dying", "failing_later"])
def test_a_run_that_loses_its_rewards_is_saved_and_resumes_bitwise(
    tiny_config, tmp_path, rewards, function, capsys
):
    tiny_config.reward.functions = (rewards + function,)
    tiny_config.algorithm.kl_coef, tiny_config.reward.normalize = 0.1, True
    assert exit_status(train, resolve(tiny_config)) == 1
    error = capsys.readouterr().err
    expected = {
        "dying": "reward workers could not be started 3 times in a row .*the module is broken",
        "failing_later": "step 3: the rewards of 16 of 16 responses failed",
    }
    assert re.search(expected[function], error) and "Traceback" not in error
    assert [p.name for p in Path(tiny_config.run_dir, "checkpoints").iterdir()] == ["2"]

    (tmp_path / "flag").unlink(missing_ok=True)  # the functions are corrected
    (tmp_path / "flag3").touch()
    assert train(resolve(tiny_config))
    interrupted = tiny_config.run_dir
    tiny_config.run_dir = str(tmp_path / "uninterrupted")
    (tmp_path / "calls").write_text("x" * 1000)
    assert train(resolve(tiny_config))
    assert_same_weights(interrupted, tiny_config.run_dir)
    assert metrics(interrupted) == metrics(tiny_config.run_dir)


@pytest.mark.thorough
def test_an_evaluation_whose_rewards_fail_writes_its_files_and_fails(
    tiny_config, tiny_model, tmp_path, rewards
):
    (tmp_path / "flag2").touch()
    cfg = read(
        [
            f"--model={tiny_model}",
            f"--data={tiny_config.data.val[0]}",
            f"--output={tmp_path / 'evaluation'}",
            f"--config.reward.functions={rewards}failing",
            "--config.data.chat_template=chatml",
            "--config.data.max_response_len=8",
            "--config.data.max_prompt_len=128",
            "--config.rollout.max_num_seqs=16",
            f"--config.compilation_cache={tiny_config.compilation_cache}",
        ]
    )
    with pytest.raises(RewardsFailed, match=r"evaluation: the rewards of 6 of 6 .*KeyError"):
        evaluate(cfg)
    summary = json.loads((tmp_path / "evaluation/summary.json").read_text())
    assert summary["results"]["all"]["errors"] == 6
    assert len((tmp_path / "evaluation/samples.jsonl").read_text().splitlines()) == 6
