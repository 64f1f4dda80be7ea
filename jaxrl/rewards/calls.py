"""Calls of reward functions: their signatures, their results, and a worker's messages with both.

A signature is recognized by the names of the parameters:

  verl        (data_source, solution_str, ground_truth, extra_info) -> score
  verl batch  (data_sources, solution_strs, ground_truths, extra_infos) -> [score, ...]
  verl group  (data_source, group_strs, ground_truth, extra_infos) -> [score, ...]
  TRL         (prompts, completions, completion_ids, **columns) -> [score or None, ...]

The group form gets all responses to one prompt. Any of them may be `async def`. A function gets
the arguments that it declares by name, or all of its form if it has **kwargs. In TRL's form every
other name is a column of the dataset.

A worker sends {"signatures": [[form, is_async, [name, ...], [name, ...], all_columns], ...]} or
{"error": text} at startup, then for each call {"begin": number} and
{"end": number, "results": [[score, {name: value}, error, {name: count}], ...]}. The first call of a
request has a "begin"; a later one begins when the call before it ends.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.subprocesses.channel import ProtocolError, is_text

MAX_SCORE = 3.4028234663852886e38  # the largest float32: advantages and losses have that type
RewardFunction = Callable[..., Any]

# The rendered prompt, and prompt plus response, both with special tokens; the prompt's messages.
MORE_ARGUMENTS = ("prompt_str", "query_str", "conversation")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_GROUP = ("data_source", "group_strs", "ground_truth", "extra_infos")
_TRL = ("prompts", "completions", "completion_ids")
# Arguments of each form. A form is recognized by its second argument, the response. `timeout_s`
# is the number of seconds that the call may take.
FORMS = {
    "verl": (*_VERL, *MORE_ARGUMENTS, "timeout_s"),
    "verl_batch": (*(f"{name}s" for name in (*_VERL, *MORE_ARGUMENTS)), "timeout_s"),
    "verl_group": (*_GROUP, "prompt_str", "conversation", "timeout_s"),
    "trl": (*_TRL, "timeout_s"),
}
_NOT_IN_TRL = ("trainer_state", "log_extra", "log_metric")  # TRL has them, they are no columns
_ACCEPTED = (
    "accepted are verl's (data_source, solution_str, ground_truth, extra_info), its batch form "
    "(data_sources, solution_strs, ground_truths, extra_infos), its form for all responses to a "
    "prompt (data_source, group_strs, ground_truth, extra_infos) and TRL's (prompts, completions, "
    "**columns), each also as async def; other parameters need a default, or in TRL's form the "
    "name of a column"
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CallSignature(NamedTuple):
    """How to call a reward function."""

    form: str  # a key of FORMS
    is_async: bool
    names: tuple[str, ...]  # arguments that it gets, if there are such
    required: tuple[str, ...] = ()  # columns that it cannot do without
    all_columns: bool = False  # it gets every column of the dataset

    @property
    def batched(self) -> bool:
        """Whether a call has lists as arguments and returns a list."""
        return self.form != "verl"


@dataclasses.dataclass(frozen=True)
class CallSettings:
    """The settings of the calls of one function."""

    # Of a call; of one response, or one pair of a group, for an async function without batches
    limit_s: float
    concurrency: int  # awaits in flight, for such functions
    batch_size: int  # responses of a call, for a batch function
    options: dict[str, Any]  # keyword arguments, in addition to those after its '?'


class RewardResult(NamedTuple):
    """The result of a function for one response: a finite score, or an error.

    The score is None if the function has none for this response (TRL's form only).
    """

    score: float | None
    parts: dict[str, float]  # further numbers that the function returned
    error: str  # why there is no score; "" if there is one
    counts: dict[str, float]  # what the function counts, with a score or without
    feedback: str = ""  # text on the response, for a self-distillation teacher


class RewardFailed(Exception):
    """Why a reward function has no score for a response, with what it counts.

    A function for one response raises it; one for several returns it in place of a score.
    """

    def __init__(self, reason: str, counts: Mapping[str, float]):
        super().__init__(reason)
        self.counts = counts


def read_signature(function: RewardFunction) -> CallSignature:
    """How to call a function. Raises ValueError, with what is accepted, if it fits no form."""
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    try:
        _check_options(function)
        parameters = list(_signature(function).parameters.values())
    except TypeError:  # some functions written in C have no signature
        return CallSignature("verl", is_async, _VERL)
    named = {p.name: p for p in parameters if p.kind in _NAMED}
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    form = _form(function, named, takes_rest)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIABLE]
    known = FORMS[form]
    for name in required:
        if name not in named:
            raise _wrong(function, f"takes {name!r} by position only")
        if name not in known and (form != "trl" or name in _NOT_IN_TRL):
            raise _wrong(function, f"requires {name!r}, which is no argument of its form")
    rest = [name for name in known[: len(_TRL) if form == "trl" else len(_VERL)] if takes_rest]
    bound = function.keywords if isinstance(function, functools.partial) else ()  # options
    names = [n for n in named if n in known or (form == "trl" and n not in _NOT_IN_TRL)]
    return CallSignature(
        form,
        is_async,
        tuple(name for name in dict.fromkeys(names + rest) if name not in bound),
        required=tuple(name for name in required if name not in known),
        all_columns=takes_rest and form == "trl",
    )


def _form(function: RewardFunction, named: Container[str], takes_rest: bool) -> str:
    """The form whose response the function declares."""
    found = [form for form, names in FORMS.items() if names[1] in named]
    if not found and takes_rest and not named:
        return "verl"  # a wrapper that passes everything on
    if len(found) != 1:
        problem = f"parameters of {' and '.join(found)}" if found else "no parameter for a response"
        raise _wrong(function, f"has {problem}")
    return found[0]


def _check_options(function: RewardFunction) -> None:
    """Raises ValueError for an option that the function does not have."""
    if not isinstance(function, functools.partial):
        return
    signature = _signature(function.func)
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return
    for name in function.keywords:
        if name not in signature.parameters:
            raise ValueError(
                f"the function {_name(function)}{signature} has no option {name!r}; omit it after "
                "the '?', or add such a parameter to the function"
            )


def _signature(function: RewardFunction) -> inspect.Signature:
    """The signature of a function. Raises TypeError if Python knows none."""
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise TypeError(str(error)) from error


def _wrong(function: RewardFunction, problem: str) -> ValueError:
    return ValueError(
        f"the function {_name(function)}{inspect.signature(function)} {problem}; {_ACCEPTED}"
    )


def _name(function: RewardFunction) -> str:
    function = function.func if isinstance(function, functools.partial) else function
    return getattr(function, "__name__", type(function).__name__)


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
    return [_valid_signature(value) for value in values]


def read_results(values: Sequence[Any], n: int) -> list[RewardResult]:
    """The results of a call for `n` responses. Raises ProtocolError."""
    if len(values) != n:
        raise ProtocolError(f"{len(values)} results for {n} responses")
    return [_valid_result(value) for value in values]


def _valid_signature(value: Any) -> CallSignature:
    match value:
        case [str(form), bool(is_async), [*names], [*required], bool(all_columns)] if (
            form in FORMS and all(map(is_text, [*names, *required]))
        ):
            return CallSignature(form, is_async, tuple(names), tuple(required), all_columns)
    raise ProtocolError(f"{value!r:.80} is no signature")


def _valid_result(value: Any) -> RewardResult:
    match value:
        case [float() | None as score, dict(parts), error, dict(counts), feedback] if (
            (score is None or is_score(score))
            and all(
                isinstance(number, float) and math.isfinite(number)
                for number in (*parts.values(), *counts.values())
            )
            and all(map(is_text, [error, *parts, *counts, feedback]))
        ):
            return RewardResult(score, parts, error, counts, feedback)
    raise ProtocolError(f"{value!r:.80} is no result")
