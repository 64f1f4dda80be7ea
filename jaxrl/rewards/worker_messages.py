"""Messages of a reward worker to the trainer, and their validation.

{"signatures": [[form, is_async, [name, ...], [name, ...], all_columns], ...]} or {"error": text} at
startup, then for each call {"begin": number} and
{"end": number, "results": [[score, {name: value}, error], ...]}. The first
call of a request has a "begin"; a later one begins when the call before it ends.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl.rewards.signatures import FORMS, CallSignature
from jaxrl.subprocesses.channel import ProtocolError, is_text


class RewardResult(NamedTuple):
    """The result of a function for one response: a finite score, or an error.

    The score is None if the function has none for this response (TRL's form only).
    """

    score: float | None
    parts: dict[str, float]  # further numbers that the function returned
    error: str  # why there is no score; "" if there is one


MAX_SCORE = 3.4028234663852886e38  # the largest float32: advantages and losses have that type


def is_score(number: float | int) -> bool:
    """Whether a number, or the weighted sum of several, is a finite float32."""
    return abs(number) <= MAX_SCORE


def check_score(score: float, subject: str) -> None:
    """Raises ValueError unless the score that `subject` returned is a finite float32."""
    if not math.isfinite(score):
        raise ValueError(f"{subject} returned {score}; return a finite number")
    if not is_score(score):
        raise ValueError(
            f"{subject} returned a score that is too large: {score:g} is beyond the range of "
            "float32"
        )


def late(limit_s: float) -> str:
    """The error of a response that has no score within its time limit."""
    return f"no answer within {limit_s:g} s (reward.timeout_s or the option timeout_s)"


def read_signatures(values: Sequence[Any], n: int) -> list[CallSignature]:
    """The signatures of `n` functions. Raises ProtocolError."""
    if len(values) != n:
        raise ProtocolError(f"{len(values)} signatures for {n} functions")
    return [_signature(value) for value in values]


def read_results(values: Sequence[Any], n: int) -> list[RewardResult]:
    """The results of a call for `n` responses. Raises ProtocolError."""
    if len(values) != n:
        raise ProtocolError(f"{len(values)} results for {n} responses")
    return [_result(value) for value in values]


def _signature(value: Any) -> CallSignature:
    match value:
        case [str(form), bool(is_async), [*names], [*required], bool(all_columns)] if (
            form in FORMS and all(map(is_text, [*names, *required]))
        ):
            return CallSignature(form, is_async, tuple(names), tuple(required), all_columns)
    raise ProtocolError(f"{value!r:.80} is no signature")


def _result(value: Any) -> RewardResult:
    match value:
        case [float() | None as score, dict(parts), error] if (
            (score is None or is_score(score))
            and all(isinstance(part, float) and math.isfinite(part) for part in parts.values())
            and all(map(is_text, [error, *parts]))
        ):
            return RewardResult(score, parts, error)
    raise ProtocolError(f"{value!r:.80} is no result")
