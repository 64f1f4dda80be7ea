"""The reward `judge`: the score of a response by a rubric, from a language model."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.json_text import Json, Message
from jaxrl.rewards.model_judge.request import render, request_body
from jaxrl.rewards.model_judge.rubric import read_rubric
from jaxrl.rewards.model_judge.verdicts import (
    JudgeServer,
    api_key,
    cached_rubric,
    verdicts_of,
)
from jaxrl.rewards.verifiers.ground_truth import as_text


async def judge(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    conversation: Sequence[Message],
    *,
    url: str,
    model: str,
    rubric: str,
    reference: str = "",
    thinking: bool = False,
    explain: bool = True,
    temperature: float = 0.0,
    max_tokens: int = 1024,
    request_s: float = 60.0,
    attempts: int = 3,
    requests: int = 16,
    api_key_env: str = "",
    cache: str = "",
    prompt_price: float = 0.0,
    completion_price: float = 0.0,
) -> dict[str, Any]:
    """The score from 0 to 1, the verdict by criterion, and counts of requests and tokens.

    The options are the keys of reward.judge; `cache` is a folder or "". Raises RewardFailed if no
    attempt gives a valid verdict.
    """
    criteria = cached_rubric(rubric)
    body = request_body(
        criteria,
        model=model,
        conversation=conversation,
        response=judged_text(solution_str, extra_info, thinking),
        reference=reference_text(reference, ground_truth, extra_info) if reference else None,
        explain=explain,
        temperature=temperature,
        max_tokens=max_tokens,
    )
    server = JudgeServer(
        url=url,
        model=model,
        api_key_env=api_key_env,
        request_s=request_s,
        requests=requests,
        attempts=attempts,
        cache=cache,
        prompt_price=prompt_price,
        completion_price=completion_price,
    )
    found = await verdicts_of(server).verdict(body, criteria.read_verdict)
    result: Json = {**found.value, "score": criteria.score(found.value), "counts": found.counts}
    return result if found.latency_s is None else result | {"latency_s": found.latency_s}


def check_options(*, rubric: str, api_key_env: str = "") -> None:
    """Raises ValueError if the rubric or the API key of a judge cannot be read."""
    read_rubric(rubric)
    api_key(api_key_env)


def judged_text(solution_str: str, extra_info: Mapping[str, Any], thinking: bool) -> str:
    """The text that the judge reads: all turns of an episode, and thinking with `thinking`."""
    episode = extra_info.get("episode")
    response = render(episode["said"]) if episode else solution_str
    return response if thinking else response.rpartition("</think>")[2]


def reference_text(column: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> str:
    """The reference answer of a row. Raises ValueError if the row has no such column."""
    if column == "answer":
        return as_text(ground_truth)
    if column not in extra_info:
        raise ValueError(
            f"the row has no column {column!r}, which reward.judge.reference names; add it, or set "
            "the key to 'answer' or ''"
        )
    return as_text(extra_info[column])
