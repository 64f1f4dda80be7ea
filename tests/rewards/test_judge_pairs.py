import asyncio
import collections
import json
import re

import numpy as np
import pytest

from jaxrl.config.keys import JudgeConfig, RewardConfig
from jaxrl.rewards.calls import RewardFailed
from jaxrl.rewards.model_judge.pairs import draw_pairs, judge_pairs
from jaxrl.rewards.pool import RewardPool
from jaxrl.types import Prompt, Rollout

QUESTION = [{"role": "user", "content": "Which?"}]
RUBRIC = """
criteria:
  - {name: large, description: The number is large., weight: 3}
  - {name: short, description: It has few digits.}
"""


@pytest.fixture
def rubric(tmp_path):
    path = tmp_path / "rubric.yaml"
    path.write_text(RUBRIC)
    return str(path)


def shown(body):
    """The two responses that a request shows."""
    text = body["messages"][1]["content"]
    return [re.search(rf"<response_{x}>\n(.*)\n</response_{x}>", text)[1] for x in "AB"]


def better(first, second):
    return "tie" if first == second else "A" if first > second else "B"


def compare(body):
    """Larger numbers are better, and shorter ones; of a response "x" there is no verdict."""
    texts = shown(body)
    if "x" in texts:
        return reply("Neither.")
    large = better(*map(int, texts))
    return reply({"large": large, "short": better(*(-len(text) for text in texts))})


def reply(verdict):
    text = verdict if isinstance(verdict, str) else json.dumps(verdict)
    usage = {"prompt_tokens": 10, "completion_tokens": 1}
    return {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage}


def ask(url, rubric, texts, truth="", **options):
    infos = [{"finish": "stop"}] * len(texts)
    options = {"attempts": 1, "model": "m", "url": url, "rubric": rubric} | options
    return asyncio.run(judge_pairs(texts, truth, infos, QUESTION, **options))


def total(found, name):
    return sum(
        (one.counts if isinstance(one, RewardFailed) else one["counts"])[name] for one in found
    )


def test_the_score_is_the_win_rate_over_all_others_in_both_orders(serve, rubric):
    server = serve(compare)
    found = ask(server.url, rubric, ["3", "20", "1"])
    # large: 20 beats 3 beats 1. short: 3 ties with 1, both beat 20
    assert [one["large"] for one in found] == [0.5, 1.0, 0.0]
    assert [one["short"] for one in found] == [0.75, 0.0, 0.75]
    # (3 * large + short) / 4
    assert [one["score"] for one in found] == [0.5625, 0.75, 0.1875]
    assert len(server.requests) == total(found, "requests") == 6  # 3 pairs in 2 orders
    assert total(found, "pairs") == 3 and total(found, "inconsistent") == 0
    assert total(found, "preferred_first") == total(found, "preferred_second") == 3
    assert total(found, "prompt_tokens") == 60
    form = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert form["properties"]["large"]["enum"] == ["A", "B", "tie"]
    assert form["required"][0] == "explanation"
    ask(server.url, rubric, ["3", "20"], explain=False)
    form = server.requests[-1]["response_format"]["json_schema"]["schema"]
    assert form["required"] == ["large", "short"]
    assert "explanation" not in server.requests[-1]["messages"][0]["content"]


def test_a_preference_for_a_position_cancels_and_is_counted(serve, rubric):
    server = serve(reply({"large": "A", "short": "A"}))
    found = ask(server.url, rubric, ["1", "2", "3"])
    assert [one["score"] for one in found] == [0.5] * 3
    assert total(found, "inconsistent") == 3
    assert (total(found, "preferred_first"), total(found, "preferred_second")) == (6, 0)
    found = ask(server.url, rubric, ["1", "2"], swap=False)
    assert sorted(one["score"] for one in found) == [0.0, 1.0] and total(found, "requests") == 1


def test_a_failed_comparison_is_left_out_and_is_no_loss(serve, rubric):
    server = serve(compare)
    first, failed, second = ask(server.url, rubric, ["2", "x", "1"])
    assert (first["large"], second["large"]) == (1.0, 0.0)  # of one comparison each
    assert isinstance(failed, RewardFailed) and "invalid: Expecting value" in str(failed)
    found = [first, failed, second]
    assert (total(found, "failures"), total(found, "failed_pairs")) == (1, 2)
    counts = [one.counts if isinstance(one, RewardFailed) else one["counts"] for one in found]
    assert sum(one.get("failed_invalid", 0) for one in counts) == 4


def test_equal_responses_tie_without_a_request(serve, rubric):
    server = serve(compare)
    found = ask(server.url, rubric, ["5", "5"])
    assert [one["score"] for one in found] == [0.5, 0.5] and not server.requests
    assert total(found, "equal_pairs") == 1


def test_each_response_can_be_compared_with_the_reference_answer_alone(serve, rubric):
    server = serve(compare)
    found = ask(server.url, rubric, ["3", "9"], truth="5", against="reference", reference="answer")
    assert [one["large"] for one in found] == [0.0, 1.0]
    assert sorted(map(shown, server.requests)) == [["3", "5"], ["5", "3"], ["5", "9"], ["9", "5"]]
    assert "reference_answer" not in server.requests[0]["messages"][1]["content"]


def test_an_empty_reference_answer_is_no_opponent(serve, rubric):
    with pytest.raises(ValueError, match="the column 'answer' of the row is empty"):
        ask(serve(compare).url, rubric, ["3"], truth="", against="reference", reference="answer")


@pytest.mark.parametrize("n, opponents", [(5, 2), (8, 4), (6, 0), (4, 8)])
def test_pairs_are_balanced_and_a_function_of_the_texts(n, opponents):
    texts = [str(i) for i in range(n)]
    pairs = draw_pairs(texts, QUESTION, opponents)
    assert pairs == draw_pairs(texts, QUESTION, opponents)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    n_opponents = opponents if 0 < opponents < n - 1 else n - 1
    assert collections.Counter(i for pair in pairs for i in pair) == dict.fromkeys(
        range(n), n_opponents
    )
    other = [draw_pairs(texts, [{"role": "user", "content": str(k)}], opponents) for k in range(5)]
    assert any(pairs != one for one in other)


def test_the_pool_compares_the_responses_of_each_prompt(serve, rubric):
    def rollout(prompt_id, text):
        prompt = Prompt(prompt_id, ({"role": "user", "content": "Q"},), np.zeros(1, np.int32), "")
        none = np.zeros(0, np.int32)
        return Rollout(
            prompt, 0, none, np.zeros(0, np.float32), none.astype(bool), none, "stop", text
        )

    server = serve(compare)
    judge = JudgeConfig(url=server.url, model="m", rubric=rubric, attempts=1)
    cfg = RewardConfig(functions=("judge_pairs",), workers=1, judge=judge)
    with RewardPool(cfg) as pool:
        found = pool.score([rollout(0, "1"), rollout(0, "2"), rollout(1, "9"), rollout(1, "x")])
        alone = pool.score([rollout(2, "1")])
    assert [one.parts.get("judge_pairs/large") for one in found[:2]] == [0.0, 1.0]
    assert all("no comparison with a verdict" in one.error for one in found[2:])
    assert sum(one.counts["judge_pairs/failures"] for one in found) == 2
    assert len(server.requests) == 4
    assert "which has no opponent; set rollout.n" in alone[0].error
