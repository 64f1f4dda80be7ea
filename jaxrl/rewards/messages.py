"""What a reward worker sends to the trainer, and its validation.

{"signatures": [[batched, [argument, ...]], ...]} or {"error": text} at startup, then for each call
{"begin": number} and {"end": number, "results": [[score, {name: value}, error], ...]}. The first
call of a request has a "begin"; a later one begins when the call before it ends.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl.rewards.functions import OPTIONAL_ARGUMENTS, CallSignature
from jaxrl.workers.channel import ProtocolError, is_text


class Result(NamedTuple):
    """The result of a function for one response: a finite score, or an error."""

    score: float
    parts: dict[str, float]  # further numbers that the function returned
    error: str  # why there is no score; "" if there is one


def read_signatures(values: Sequence[Any], n: int) -> list[CallSignature]:
    """The signatures of `n` functions. Raises ProtocolError."""
    if len(values) != n:
        raise ProtocolError(f"{len(values)} signatures for {n} functions")
    return [_signature(value) for value in values]


def read_results(values: Sequence[Any], n: int) -> list[Result]:
    """The results of a call for `n` responses. Raises ProtocolError."""
    if len(values) != n:
        raise ProtocolError(f"{len(values)} results for {n} responses")
    return [_result(value) for value in values]


def _signature(value: Any) -> CallSignature:
    match value:
        case [bool(batched), [*names]] if all(name in OPTIONAL_ARGUMENTS for name in names):
            return CallSignature(batched, tuple(names))
    raise ProtocolError(f"{value!r:.80} is no signature")


def _result(value: Any) -> Result:
    match value:
        case [float(score), dict(parts), error] if (
            math.isfinite(score)
            and all(isinstance(part, float) and math.isfinite(part) for part in parts.values())
            and all(map(is_text, [error, *parts]))
        ):
            return Result(score, parts, error)
    raise ProtocolError(f"{value!r:.80} is no result")
