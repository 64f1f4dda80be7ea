"""Runs with the data and the reward functions of other frameworks' users."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.config import resolve
from jaxrl.train import train
from tests.trainer.test_train import metrics

FUNCTIONS = """
import asyncio, re, string


def normal(text):
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


def exact_match(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    targets = ground_truth["target"]
    score = bool(found) and normal(found[-1]) in map(normal, targets)
    return {"score": score, "targets": len(targets), "index": extra_info["index"]}


async def judged(solution_str, ground_truth):
    await asyncio.sleep(0.01)
    return len(set(solution_str)) / 8


def known(completions, golden_answers, **columns):
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [float(len(answers)) for answers in golden_answers]
"""
QUESTIONS = {
    "who wrote hamlet": ["William Shakespeare", "Shakespeare"],
    "what is the capital of france": ["Paris"],
    "how many legs has an ant": ["6", "six", "six legs"],
    "which planet is the largest": ["Jupiter"],
}


@pytest.mark.slow
def test_search_r1s_rows_and_rewards_of_every_form_train_unchanged(tiny_config, tmp_path):
    rows = [
        {
            "id": f"train_{i}",
            "data_source": "nq",
            "prompt": [{"role": "user", "content": f"Answer in <answer></answer>. {question}?"}],
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": targets}, "style": "rule"},
            "golden_answers": targets,
            "extra_info": {"index": i, "split": "train"},
        }
        for i, (question, targets) in enumerate(QUESTIONS.items())
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "nq.parquet")
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    names = ("exact_match", "judged", "known")
    tiny_config.reward.functions = tuple(f"{tmp_path / 'mine.py'}:{name}" for name in names)
    tiny_config.data.train = tiny_config.data.val = (str(tmp_path / "nq.parquet"),)
    tiny_config.total_steps = 2
    cfg = resolve(tiny_config)
    train(cfg)
    found = [line for line in metrics(cfg.run_dir) if "reward/known" in line]
    assert len(found) == 2
    for line in found:  # every step has all four rows
        assert line["reward/errors"] == 0
        assert line["reward/exact_match/targets"] == line["reward/known"] == (2 + 1 + 3 + 1) / 4
        assert line["reward/exact_match/index"] == (0 + 1 + 2 + 3) / 4
        assert 0 < line["reward/judged"] <= 1
    samples = (Path(cfg.run_dir) / "samples.jsonl").read_text().splitlines()
    assert {json.loads(sample)["answer"] for sample in samples} == {
        json.dumps({"target": targets}) for targets in QUESTIONS.values()
    }
