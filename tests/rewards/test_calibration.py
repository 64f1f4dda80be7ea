"""Tests of jaxrl/rewards/model_judge/calibration.py and of its use by jaxrl.evaluate."""

import json
from typing import Any

import pytest

from jaxrl.config.resolve import default_config, resolve, resolve_evaluation
from jaxrl.evaluate import evaluate
from jaxrl.rewards.model_judge.calibration import read_labels
from jaxrl.rewards.model_judge.rubric import read_rubric
from tests.config.runnable import runnable

RUBRIC = """
criteria:
  - {name: correct, description: The result is right., scale: [1, 3]}
  - {name: short, description: It has few words.}
"""
ROWS = [
    {"prompt": "1?", "response": "a", "answer": "x", "labels": {"correct": 1, "short": 1}},
    {"prompt": "2?", "response": "b", "answer": "x", "labels": {"correct": 2, "short": 0}},
    {"prompt": "3?", "response": "c", "answer": "x", "labels": {"correct": 3}},
    {"prompt": "4?", "response": "d", "answer": "x", "labels": {"correct": 3, "short": 1}},
]
CORRECT = {"a": 1, "b": 3, "c": 3}  # of the judge, which says nothing of d


def verdict(body):
    text = body["messages"][1]["content"]
    response = text.partition("<response>\n")[2][0]
    scores = {"explanation": "", "correct": CORRECT.get(response, 0), "short": 1}
    return {"choices": [{"message": {"content": json.dumps(scores)}, "finish_reason": "stop"}]}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def test_the_judge_is_compared_with_labels(serve, files, capsys):
    server = serve(verdict)
    config: Any = default_config()
    config.run_dir = str(files / "out")
    config.eval.judge_labels = str(files / "labels.jsonl")
    config.reward.functions, config.reward.workers = ("judge",), 1
    judge = config.reward.judge
    judge.url, judge.model, judge.rubric = server.url, "m", str(files / "rubric.yaml")
    judge.attempts, judge.reference = 1, "answer"
    assert evaluate(resolve_evaluation(config))
    found = json.loads((files / "out" / "calibration.json").read_text())
    correct, short, score = (found["results"][name] for name in ("correct", "short", "score"))
    # labels 1 2 3, judge 1 3 3: as in tests/algorithms/test_agreement.py
    assert correct["n"] == 3 and correct["agreement"] == pytest.approx(2 / 3)
    assert correct["kappa"] == pytest.approx(0.8) and correct["bias"] == pytest.approx(1 / 3)
    assert short == {"n": 2, "agreement": 0.5, "kappa": 0.0, "spearman": "NaN", "bias": 0.5}
    # scores of the labels (0 + 1) / 2 and (1/2 + 0) / 2, of the judge (0 + 1) / 2 and (1 + 1) / 2
    assert score == {"n": 2, "spearman": pytest.approx(-1.0), "bias": pytest.approx(0.375)}
    assert found["counts"]["judge/failures"] == 1
    assert "correct is 0, no integer from 1 to 3" in found["verdicts"][3]["error"]
    assert "4 responses, 1 without a verdict" in capsys.readouterr().out
    assert len(server.requests) == 4
    assert "<reference_answer>\nx" in server.requests[0]["messages"][1]["content"]


@pytest.mark.parametrize(
    "change, error",
    [
        ({"labels": {"correct": 4}}, r"labels.jsonl:1: correct is 4, no integer from 1 to 3"),
        ({"labels": {"right": 1}}, "the label right is no criterion; known are correct, short"),
        ({"labels": {}}, "the row has no label"),
        ({"response": 5}, "the response is 5, no text"),
        ({"prompt": 5}, "the prompt is 5, neither text nor messages"),
    ],
)
def test_wrong_rows_are_refused(files, change, error):
    path = files / "labels.jsonl"
    path.write_text(json.dumps(ROWS[0] | change))
    with pytest.raises(ValueError, match=error):
        read_labels(str(path), read_rubric(str(files / "rubric.yaml")))


def test_labels_without_a_judge_and_in_training_are_refused():
    config: Any = default_config()
    config.eval.judge_labels = "labels.jsonl"
    with pytest.raises(ValueError, match=r"has no 'judge'; set reward\.functions"):
        resolve_evaluation(config)
    with pytest.raises(ValueError, match=r"is for jaxrl\.evaluate; omit it in training"):
        resolve(runnable(eval__judge_labels="labels.jsonl"))
