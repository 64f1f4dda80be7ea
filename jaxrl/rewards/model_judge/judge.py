"""The reward `judge`: the score of a response by a rubric, from a language model."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.json_text import Json, Message
from jaxrl.rewards.model_judge.options import JudgeOptions, takes_options
from jaxrl.rewards.model_judge.request import render, request_body
from jaxrl.rewards.model_judge.rubric import read_rubric
from jaxrl.rewards.model_judge.verdicts import api_key, cached_rubric, verdicts_of
from jaxrl.rewards.verifiers.ground_truth import as_text


@takes_options(JudgeOptions)
async def judge(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    conversation: Sequence[Message],
    *,
    options: JudgeOptions,
) -> dict[str, Any]:
    """The score from 0 to 1, the verdict by criterion, and counts of requests and tokens.

    Raises RewardFailed if no attempt gives a valid verdict.
    """
    criteria = cached_rubric(options.rubric)
    body = request_body(
        criteria,
        conversation=conversation,
        response=judged_text(solution_str, extra_info, options.thinking),
        reference=reference_text(options.reference, ground_truth, extra_info),
        **options.request,
    )
    found = await verdicts_of(options.server).verdict(body, criteria.read_verdict)
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


def reference_text(column: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> str | None:
    """The reference answer of a row, None if it is empty or `column` is "".

    Raises ValueError if the row has no such column.
    """
    if not column:
        return None
    if column == "answer":
        return as_text(ground_truth) or None
    if column not in extra_info:
        raise ValueError(
            f"the row has no column {column!r}, which reward.judge.reference names; add it, or set "
            "the key to 'answer' or ''"
        )
    return as_text(extra_info[column]) or None
