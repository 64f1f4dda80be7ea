"""Runs whose reward is a language model's verdict, with a scripted server as the model."""

import json

import numpy as np
import pytest

from jaxrl.config import resolve
from jaxrl.train import train
from tests.rewards.conftest import Server
from tests.trainer.test_train import metrics

RUBRIC = """
criteria:
  - {name: letters, description: The response has letters., scale: [0, 8]}
"""


def verdict(body):
    """The letters among the first 8 characters; of a response that starts with a digit, prose."""
    response = body["messages"][1]["content"].partition("<response>\n")[2]
    response = response.removesuffix("\n</response>")
    found = {"explanation": "", "letters": sum(c.isalpha() for c in response[:8])}
    text = "It is fine." if response[:1].isdigit() else json.dumps(found)
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage}


@pytest.fixture
def judge_config(tiny_config, tmp_path):
    server = Server(verdict)
    path = tmp_path / "rubric.yaml"
    path.write_text(RUBRIC)
    tiny_config.reward.functions = ("judge",)
    judge = tiny_config.reward.judge
    judge.url, judge.model, judge.rubric, judge.attempts = server.url, "scripted", str(path), 1
    yield tiny_config
    server.close()


@pytest.mark.thorough
def test_a_run_learns_a_rubric_and_leaves_out_responses_without_a_verdict(judge_config):
    judge_config.total_steps, judge_config.data.prompts_per_step = 12, 8
    judge_config.learner.lr = 1e-2
    train(resolve(judge_config))
    steps = [m for m in metrics(judge_config.run_dir) if "reward/mean" in m]
    scores = [m["reward/judge/letters"] for m in steps]
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 0.5
    before, *_, after = [
        m["val/reward"] for m in metrics(judge_config.run_dir) if "val/reward" in m
    ]
    assert after > before + 0.3
    failures = sum(m["reward/judge/failures"] for m in steps)
    assert failures > 0
    assert failures == sum(m["reward/errors"] for m in steps)
    assert failures == sum(m.get("reward/judge/failed_invalid", 0) for m in steps)
    for m in steps:
        n = m["reward/judge/requests"] + m["reward/judge/cached"]
        assert n == 8 * 4 and m["reward/judge/prompt_tokens"] == 100 * m["reward/judge/requests"]
        assert m["reward/mean"] == pytest.approx(m["reward/judge/letters"] / 8)
