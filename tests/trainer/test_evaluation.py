"""Tests of jaxrl/trainer/evaluation.py by hand, and of jaxrl/evaluate.py on a tiny model."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxrl.config.keys import EvalConfig
from jaxrl.config.resolve import resolve, resolve_evaluation
from jaxrl.evaluate import evaluate, interval, read, table
from jaxrl.models.files.source import resolve_model
from jaxrl.report.trajectories import trajectory_rows
from jaxrl.tracking.json_lines import read_lines
from jaxrl.train import train
from jaxrl.trainer.evaluation import statistics, validation_metrics
from jaxrl.types import Prompt, Reward, Rollout, ScoredRollout
from tests.trainer.test_train import metrics


def rollouts(rewards, *, source="s", finish="stop", parts=None):
    """Scored rollouts: one prompt per row of `rewards`, one sample per number."""
    return [
        ScoredRollout(
            Rollout(
                prompt=Prompt(
                    id=i, messages=(), tokens=np.zeros(3, np.int32), answer="", source=source
                ),
                sample=j,
                tokens=np.zeros(j + 1, np.int32),
                logp=np.zeros(j + 1, np.float32),
                loss_mask=np.ones(j + 1, bool),
                versions=np.zeros(j + 1, np.int32),
                finish=finish,
            ),
            Reward(float(reward), parts or {}),
        )
        for i, row in enumerate(rewards)
        for j, reward in enumerate(row)
    ]


def test_statistics_equal_hand_calculated_numbers():
    some = rollouts([[1, 0], [1, 1], [0.5, 0]], parts={"format": 0.25})
    found = statistics(some, EvalConfig(n=2, k=(1, 2)))
    # per prompt: mean reward 1/2, 1, 1/4; pass@1 1/2, 1, 0; pass@2 1, 1, 0
    assert found["reward"] == pytest.approx(7 / 12)
    assert found["pass_at_1"] == pytest.approx(1 / 2)
    assert found["pass_at_2"] == pytest.approx(2 / 3)
    # pass@1 of 1/2, 1, 0: squared deviations 0 + 1/4 + 1/4, divided by 2 and by 3
    assert found["pass_at_1_stderr"] == pytest.approx(math.sqrt(1 / 12))
    assert found["reward/format"] == 0.25 and found["response_len"] == 1.5
    assert found["truncated_fraction"] == 0 and found["errors"] == 0
    lenient = statistics(some, EvalConfig(n=2, k=(2,), pass_reward=0.5))
    assert lenient["pass_at_2"] == 1


def test_one_prompt_has_no_standard_error():
    assert "reward_stderr" not in statistics(rollouts([[1, 0]]), EvalConfig(n=2))


def test_statistics_are_reported_per_data_source():
    some = rollouts([[1], [1]], source="b") + rollouts([[0], [1]], source="a", finish="length")
    found = validation_metrics(some, EvalConfig())
    assert [found[f"val/{name}"] for name in ("reward", "a/reward", "b/pass_at_1")] == [
        0.75,
        0.5,
        1,
    ]
    assert found["val/truncated_fraction"] == 0.5 and found["val/a/truncated_fraction"] == 1
    alone = validation_metrics(some[:2], EvalConfig())
    assert not [name for name in alone if name.startswith("val/b")]


def test_the_table_shows_half_of_the_95_percent_interval():
    found = {"reward": 0.5, "reward_stderr": 0.1, "pass_at_1": 1.0}
    assert interval(found, "reward") == "0.500 ± 0.196" and interval(found, "pass_at_1") == "1.000"


@pytest.mark.thorough
def test_evaluating_a_run_repeats_its_validation(tiny_config):
    tiny_config.total_steps = 1
    tiny_config.learner.lr = 0.0  # the export equals the model of step 0; the seed is the same
    tiny_config.eval.n, tiny_config.eval.k = 2, (1, 2)
    tiny_config.eval.pass_reward, tiny_config.eval.sampling.temperature = 0.25, 1.0
    assert train(resolve(tiny_config))
    folder = Path(tiny_config.run_dir)
    validated, _ = [line for line in metrics(folder) if "val/reward" in line]
    assert validated["step"] == 0 and 0 < validated["val/pass_at_1"] < validated["val/pass_at_2"]
    assert evaluate(read([f"--model={folder}"]))
    summary = json.loads((folder / "evaluation" / "summary.json").read_text())
    found = summary["results"]["all"]
    assert found.pop("prompts") == 6 and summary["n"] == 2
    assert {f"val/{name}": value for name, value in found.items()} == pytest.approx(
        {name: value for name, value in validated.items() if name.startswith("val/")}, abs=1e-7
    )


@pytest.mark.thorough
def test_an_evaluation_writes_a_summary_per_data_source_and_its_samples(
    tiny_config, tmp_path, capsys
):
    one, two = (f"task:addition?digits={d}&size=4&split=val" for d in (1, 2))
    tiny_config.run_dir, tiny_config.data.val = str(tmp_path), (one, two)
    tiny_config.eval.n, tiny_config.eval.k = 4, (1, 4)
    tiny_config.eval.pass_reward, tiny_config.eval.sampling.temperature = 0.25, 1.0
    tiny_config.log.trajectories = 3
    assert evaluate(resolve_evaluation(tiny_config))
    summary = json.loads((tmp_path / "summary.json").read_text())
    results = summary["results"]
    assert {source: found["prompts"] for source, found in results.items()} == {
        "all": 8,
        "addition/1": 4,
        "addition/2": 4,
    }
    assert 0 < results["all"]["pass_at_1"] < results["all"]["pass_at_4"]
    samples = read_lines(tmp_path / "samples.jsonl")
    assert len(samples) == 32 and len({s["completion"] for s in samples if s["prompt_id"] == 0}) > 1
    assert len(trajectory_rows(samples)) == 3
    np.testing.assert_allclose(results["all"]["reward"], np.mean([s["reward"] for s in samples]))
    assert table(summary) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n=4", "--k=8", "--temperature=1"], r"eval\.k=\(8,\) includes pass@8.*eval\.n=4.*8"),
        (["--n=4"], r"eval\.n=4 greedy samples.*temperature"),
        (["--n=many"], "eval.n"),
        (["--sample=4"], "unknown argument --sample=4.*known: --model"),
        (["--config.reward.functions=maths"], "did you mean 'math'"),
        (["--config.eval.kk=1"], r"eval\.k"),
        (["--data="], "data.val is empty"),
    ],
)
def test_invalid_arguments_are_rejected_before_any_model_loads(arguments, words):
    with pytest.raises(SystemExit, match=words):
        read(["--model=m", "--data=d.jsonl", *arguments])


def test_a_run_folder_without_an_export_is_rejected(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"no export .*hf.*jaxrl\.convert"):
        resolve_model(tmp_path)
