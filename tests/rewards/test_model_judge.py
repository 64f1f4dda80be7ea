import asyncio
import json
import time

import numpy as np
import pytest

from jaxrl.config.keys import JudgeConfig, RewardConfig
from jaxrl.rewards.calls import RewardFailed
from jaxrl.rewards.model_judge import verdicts
from jaxrl.rewards.model_judge.judge import judge
from jaxrl.rewards.model_judge.rubric import read_rubric
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.settings import call_settings
from jaxrl.types import Prompt, Rollout

RUBRIC = """
instructions: The task is arithmetic.
criteria:
  - {name: correct, description: The result is right., weight: 3, scale: [1, 5]}
  - {name: short, description: It has few words.}
"""
GOOD = {"explanation": "Right.", "correct": 4, "short": 1}
# correct 4 of 1 to 5 is 3/4, with weight 3; short 1 of 0 to 1 is 1, with weight 1
GOOD_SCORE = (3 * 0.75 + 1) / 4


@pytest.fixture
def rubric(tmp_path):
    path = tmp_path / "rubric.yaml"
    path.write_text(RUBRIC)
    return str(path)


def completion(content, *, finish="stop", **message):
    text = content if isinstance(content, str | None) else json.dumps(content)
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 7}}


def nonzero(counts):
    return {name: n for name, n in counts.items() if n}


def ask(url, rubric, response="4", extra=None, truth="4", **options):
    conversation = [{"role": "user", "content": "2 + 2?"}]
    asked = judge(
        response,
        truth,
        {"finish": "stop"} | (extra or {}),
        conversation,
        url=url,
        model="m",
        rubric=rubric,
        attempts=options.pop("attempts", 1),
        **options,
    )
    return asyncio.run(asked)


def test_the_score_is_the_weighted_mean_of_the_criteria_on_their_scales(serve, rubric):
    server = serve(completion(GOOD))
    found = ask(server.url, rubric, extra={"notes": "four"}, reference="notes")
    assert found.pop("latency_s") > 0
    counts = {"requests": 1, "prompt_tokens": 50, "completion_tokens": 7}
    assert nonzero(found.pop("counts")) == counts
    assert found == {"correct": 4, "short": 1, "score": GOOD_SCORE}
    (body,) = server.requests
    form = body["response_format"]["json_schema"]
    assert form["strict"] and form["schema"]["required"] == ["explanation", "correct", "short"]
    assert form["schema"]["properties"]["correct"]["enum"] == [1, 2, 3, 4, 5]
    system, user = (message["content"] for message in body["messages"])
    assert "The result is right." in system and "The task is arithmetic." in system
    assert "2 + 2?" in user and "<reference_answer>\nfour" in user
    assert "<response>\n4\n</response>" in user
    assert (body["temperature"], body["max_tokens"]) == (0.0, 1024)


def test_an_empty_reference_answer_is_left_out(serve, rubric):
    server = serve(completion(GOOD))
    ask(server.url, rubric, truth="", reference="answer")
    ask(server.url, rubric, extra={"notes": ""}, reference="notes")
    assert not any("reference_answer" in str(body["messages"]) for body in server.requests)


def test_a_judge_on_the_devices_has_a_name_in_the_cache(serve, rubric, tmp_path):
    """The URL of a run's own endpoint is another one in every process."""
    first, second = serve(completion(GOOD)), serve(completion(GOOD))
    options = dict(cache=str(tmp_path / "judge"), cache_name="reference")
    ask(first.url, rubric, **options)
    found = ask(second.url, rubric, **options)
    assert nonzero(found["counts"]) == {"cached": 1} and found["score"] == GOOD_SCORE
    assert len(first.requests) == 1 and not second.requests
    assert nonzero(ask(second.url, rubric, response="5", **options)["counts"])["requests"] == 1


@pytest.mark.parametrize(
    ("weights", "kept", "name"),
    [("server", True, ""), ("reference", True, "reference"), ("policy", False, "policy")],
)
def test_verdicts_of_current_weights_are_not_kept(tmp_path, weights, kept, name):
    cfg = RewardConfig(functions=("judge",), judge=JudgeConfig(weights=weights))
    (settings,) = call_settings(cfg, tmp_path)
    assert settings.options["cache"] == (str(tmp_path / "judge") if kept else "")
    assert settings.options["cache_name"] == name


def test_the_judge_sees_no_thinking_but_the_turns_of_an_episode(serve, rubric):
    server = serve(completion(GOOD))
    ask(server.url, rubric, "<think>hm</think>4")
    ask(server.url, rubric, "<think>hm</think>4", thinking=True)
    said = [{"role": "assistant", "content": "look"}, {"role": "tool", "content": "seen"}]
    ask(server.url, rubric, extra={"episode": {"asked": [], "said": said}})
    texts = [body["messages"][1]["content"].partition("<response>")[2] for body in server.requests]
    assert texts[0].startswith("\n4\n") and "hm" in texts[1]
    assert texts[2].startswith("\n[assistant]\nlook\n\n[tool]\nseen\n")


@pytest.mark.parametrize(
    "answer, kind, reason",
    [
        (completion("The answer is good, 5 of 5."), "invalid", "Expecting value"),
        (completion({"explanation": "", "correct": 4}), "invalid", "no score for short"),
        (completion(GOOD | {"correct": 6}), "invalid", "correct is 6, no integer from 1 to 5"),
        (completion(GOOD | {"correct": 4.5}), "invalid", "correct is 4.5, no integer"),
        (completion(GOOD | {"short": True}), "invalid", "short is True, no integer"),
        (completion(GOOD | {"kind": 1}), "invalid", "fields that are no criteria: kind"),
        (completion([4, 1]), "invalid", "a JSON list, not an object"),
        (completion('{"expl', finish="length"), "invalid", "truncated after 7 tokens; raise"),
        (completion(None), "invalid", "the reply has no text"),
        (completion(None, refusal="I will not."), "refusal", "the judge refuses: 'I will not.'"),
        (completion("", finish="content_filter"), "refusal", "content_filter"),
        (b"<html>", "invalid", "no chat completion: b'<html>'"),
        ({"choices": []}, "invalid", "no chat completion"),
        (503, "status", "status 503"),
    ],
)
def test_a_judge_that_fails_gives_a_named_error_and_counts_not_a_zero(
    serve, rubric, answer, kind, reason, monkeypatch
):
    monkeypatch.setattr(verdicts, "FIRST_WAIT_S", 0.0)
    server = serve(answer)
    with pytest.raises(RewardFailed, match=rf"no verdict after 2 attempts; {kind}: ") as failed:
        ask(server.url, rubric, attempts=2)
    assert reason in str(failed.value)
    counts = failed.value.counts
    assert counts["requests"] == len(server.requests) == counts[f"failed_{kind}"] == 2
    assert counts["failures"] == 1
    has_usage = isinstance(answer, dict) and answer["choices"]
    assert counts.get("prompt_tokens", 0) == (2 * 50 if has_usage else 0)


def test_a_failed_attempt_is_repeated_and_a_wrong_request_is_not(serve, rubric, monkeypatch):
    monkeypatch.setattr(verdicts, "FIRST_WAIT_S", 0.0)
    server = serve(503, completion("prose"), completion(GOOD))
    found = ask(server.url, rubric, attempts=3)
    counts = {"requests": 3, "failed_status": 1, "failed_invalid": 1}
    assert found["score"] == GOOD_SCORE
    assert nonzero(found["counts"]) == counts | {"prompt_tokens": 100, "completion_tokens": 14}
    server = serve(404)
    with pytest.raises(RewardFailed, match=r"after 1 attempts; status: .* 404"):
        ask(server.url, rubric, attempts=3)
    assert len(server.requests) == 1


def test_a_judge_that_does_not_answer_is_a_timeout_and_a_closed_one_unreachable(serve, rubric):
    def slow(_):
        time.sleep(0.5)
        return completion(GOOD)

    with pytest.raises(RewardFailed, match=r"timeout: http.* sent no reply within 0\.1 s"):
        ask(serve(slow).url, rubric, request_s=0.1)
    closed = serve(completion(GOOD))
    closed.close()
    with pytest.raises(RewardFailed, match="unreachable: http"):
        ask(closed.url, rubric)


def test_equal_requests_are_sent_once_and_a_changed_one_again(serve, rubric, tmp_path):
    server, folder = serve(completion(GOOD)), str(tmp_path / "judge")

    async def several():
        arguments = ("4", "4", {}, [{"role": "user", "content": "2 + 2?"}])
        options = {"url": server.url, "model": "m", "rubric": rubric, "cache": folder}
        return await asyncio.gather(*(judge(*arguments, **options) for _ in range(3)))

    found = asyncio.run(several())
    assert [one["score"] for one in found] == [GOOD_SCORE] * 3 and len(server.requests) == 1
    assert nonzero(found[1]["counts"]) == {"cached": 1} and "latency_s" not in found[1]
    assert nonzero(ask(server.url, rubric, cache=folder)["counts"]) == {"cached": 1}
    ask(server.url, rubric, temperature=0.5, cache=folder)
    assert len(server.requests) == 2


def rollout(text, prompt_id=0):
    prompt = Prompt(prompt_id, ({"role": "user", "content": "2 + 2?"},), np.zeros(1, np.int32), "4")
    tokens = np.zeros(len(text), np.int32)
    mask = np.ones(len(text), bool)
    return Rollout(prompt, 0, tokens, np.zeros(len(text), np.float32), mask, tokens, "stop", text)


def test_the_pool_scores_by_the_keys_and_leaves_failures_out(serve, rubric, tmp_path):
    def answer(body):
        return completion("no" if "bad" in body["messages"][1]["content"] else GOOD)

    server = serve(answer)
    options = JudgeConfig(url=server.url, model="m", rubric=rubric, attempts=1)
    cfg = RewardConfig(functions=("judge",), workers=1, judge=options)
    with RewardPool(cfg, run_folder=tmp_path) as pool:
        good, bad, again = pool.score([rollout("4"), rollout("bad"), rollout("4")])
    assert good.value == again.value == GOOD_SCORE and not good.error
    assert good.parts["judge/correct"] == 4 and good.counts["judge/requests"] == 1
    assert nonzero(again.counts) == {"judge/cached": 1}
    assert "judge: RewardFailed: no verdict after 1 attempts; invalid: " in bad.error
    assert bad.counts["judge/failures"] == bad.counts["judge/failed_invalid"] == 1
    assert len(list((tmp_path / "judge").glob("*/*.json"))) == 1


@pytest.mark.parametrize(
    "text, error",
    [
        ("criteria: []", "no list of criteria"),
        ("[1]", "it is .1., no mapping"),
        ("criteria: [{name: a}]", "a criterion has no description"),
        ("criteria: [{name: score, description: d}]", "has the name 'score'"),
        ("criteria: [{name: a b, description: d}]", "has the name 'a b'"),
        ("criteria: [{name: a, description: d, weight: 0}]", "the weight of a is 0"),
        ("criteria: [{name: a, description: d, scale: [5, 1]}]", r"the scale of a is \[5, 1\]"),
        ("criteria: [{name: a, description: d, max: 3}]", "unknown field 'max'"),
        ("criteria: [{name: a, description: d}, {name: a, description: d}]", "have the name a"),
        ("criteria: [", "cannot be read"),
    ],
)
def test_a_wrong_rubric_is_refused_before_the_run(tmp_path, text, error):
    path = tmp_path / "rubric.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=error):
        read_rubric(str(path))
    options = JudgeConfig(url="http://x", model="m", rubric=str(path))
    with pytest.raises(ValueError, match=error):
        RewardPool(RewardConfig(functions=("judge",), judge=options))


def test_the_cost_is_the_price_of_all_tokens_also_of_failed_requests(serve, rubric, monkeypatch):
    monkeypatch.setattr(verdicts, "FIRST_WAIT_S", 0.0)
    server = serve(completion("prose"), completion(GOOD))
    found = ask(server.url, rubric, attempts=2, prompt_price=2.0, completion_price=10.0)
    # 2 requests of 50 + 7 tokens: (100 * 2 + 14 * 10) / 10^6
    assert found["counts"]["cost"] == pytest.approx(340e-6)


def test_a_missing_key_of_the_server_is_refused_before_the_run(rubric, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    options = JudgeConfig(url="http://x", model="m", rubric=rubric, api_key_env="JUDGE_KEY")
    with pytest.raises(ValueError, match="JUDGE_KEY is not set"):
        RewardPool(RewardConfig(functions=("judge",), judge=options))
