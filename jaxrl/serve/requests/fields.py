"""Fields of the request bodies: OpenAI's, vLLM's extensions, and those that are not supported."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from jaxrl.config.schema import build, flatten, key, keys, to_dict
from jaxrl.engine.device.adjustments import N_TOP
from jaxrl.http.errors import RequestError
from jaxrl.http.fields import IGNORED, unknown_field, unsupported_field

MAX_INT = 2**31 - 1
MAX_LISTED = 8  # model names in an error
MAX_FIELD_LEN = 1024  # characters of a string or items of a list, in typed fields
# Unsupported fields of OpenAI and vLLM, with the values that have no effect and are accepted.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "suffix": ("",),
}


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    include_usage: bool = key(False, "send the token counts in a final chunk")


@dataclasses.dataclass(frozen=True)
class ModelFields:
    """Fields of every endpoint. `untyped` are fields of several types, which others parse."""

    untyped: ClassVar[tuple[str, ...]] = ()
    model: str = key("", "served model name; '' is the base model")


@dataclasses.dataclass(frozen=True)
class Fields(ModelFields):
    """Fields of both endpoints: OpenAI's, then vLLM's."""

    max_tokens: int = key(
        0, "response tokens; default: the rest of the context (chat) or 16", ge=0, le=MAX_INT
    )
    temperature: float = key(1.0, "softmax temperature; 0 = greedy", ge=0, le=100)
    top_p: float = key(
        1.0, "nucleus sampling: the most likely tokens with this total probability", gt=0, le=1
    )
    n: int = key(1, "choices per prompt", ge=1, le=MAX_INT)
    seed: int = key(0, "random seed; default: a new one per request", ge=-(2**63), le=2**63 - 1)
    stream: bool = key(False, "send the response as server-sent events")
    stream_options: StreamOptions = dataclasses.field(default_factory=StreamOptions)
    top_k: int = key(0, "sample from the k most likely tokens; 0 or -1 = off", ge=-1, le=MAX_INT)
    min_p: float = key(
        0.0, "minimum probability of a token, relative to the most likely one", ge=0, le=1
    )
    frequency_penalty: float = key(
        0.0, "subtracted from a logit per occurrence of its token in the response", ge=-2, le=2
    )
    presence_penalty: float = key(
        0.0, "subtracted from the logits of tokens that are in the response", ge=-2, le=2
    )
    repetition_penalty: float = key(
        1.0,
        "divides positive and multiplies negative logits of tokens in prompt and response",
        ge=0.01,
        le=100,
    )
    min_tokens: int = key(
        0, "tokens before stop tokens and stop strings can end the response", ge=0, le=MAX_INT
    )
    stop_token_ids: tuple[int, ...] = key((), "token ids that end a response", ge=0)
    ignore_eos: bool = key(False, "generate max_tokens tokens, ignoring stop tokens")
    return_token_ids: bool = key(False, "return the token ids of prompt and response")


@dataclasses.dataclass(frozen=True)
class ChatFields(Fields):
    untyped = (
        *("chat_template_kwargs", "logit_bias", "messages", "response_format", "stop"),
        *("tool_choice", "tools"),
    )
    max_completion_tokens: int = key(0, "OpenAI's newer name of max_tokens", ge=0, le=MAX_INT)
    parallel_tool_calls: bool = key(True, "allow several tool calls in a response")
    logprobs: bool = key(False, "return the logprob of every token")
    top_logprobs: int = key(
        0, "return the logprobs of this many most likely tokens", ge=0, le=N_TOP
    )


@dataclasses.dataclass(frozen=True)
class CompletionFields(Fields):
    untyped = ("logit_bias", "prompt", "response_format", "stop")
    logprobs: int = key(
        0,
        "return the logprob of every token and of this many most likely tokens",
        ge=0,
        le=N_TOP,
    )
    echo: bool = key(False, "return the prompt in front of the response")
    prompt_logprobs: int = key(
        0,
        "return, by token id, the logprob of every token of the prompt and of this many most "
        "likely tokens in its place",
        ge=0,
        le=N_TOP,
    )


def read_fields[F: ModelFields](
    schema: type[F], body: Mapping[str, Any], models: Sequence[str]
) -> tuple[F, dict[str, Any]]:
    """(typed fields with defaults, the values that the body sets by dotted name).

    Raises RequestError for an unknown or unsupported field, a value of the wrong type or range, or
    a model that is not in `models`.
    """
    known = keys(schema)
    present = {
        name: value
        for name, value in _members(body, known, schema.untyped).items()
        if value is not None and not _has_no_effect(name, value)
    }
    for name, value in present.items():
        _check_field(name, value, known)
    fields, errors = build(schema, flatten(to_dict(schema())) | present)
    if errors:
        named = [name for name in present if errors[0].startswith(f"{name}=")]
        raise RequestError(400, "; ".join(errors), param=named[0] if named else None)
    if fields.model not in ("", *models):
        raise unknown_model(fields.model, models)
    return fields, present


def unknown_model(name: str, models: Sequence[str]) -> RequestError:
    """The error for a model name that is not in `models`."""
    names = ", ".join(map(repr, models[:MAX_LISTED]))
    more = ", ..." if len(models) > MAX_LISTED else ""
    return RequestError(
        404,
        f"the model {name[:64]!r} is not served here; use {names}{more}",
        param="model",
        code="model_not_found",
    )


def _members(
    body: Mapping[str, Any], known: Iterable[str], untyped: tuple[str, ...]
) -> dict[str, Any]:
    """The typed fields of a body; members of an object with typed members have dotted names."""
    sections = {name.partition(".")[0] for name in known if "." in name}
    members = {}
    for name, value in body.items():
        if name in sections and isinstance(value, Mapping):
            members |= {f"{name}.{member}": inner for member, inner in value.items()}
        elif name not in untyped and name not in IGNORED:
            members[name] = value
    return members


def _has_no_effect(name: str, value: Any) -> bool:
    """Whether it is an accepted value of an unsupported field; true is not 1."""
    return any(
        value == v and isinstance(value, bool) == isinstance(v, bool)
        for v in UNSUPPORTED.get(name, ())
    )


def _check_field(name: str, value: Any, known: Iterable[str]) -> None:
    """Checks that cost little, before any value is converted or printed."""
    if name in UNSUPPORTED:
        raise unsupported_field(name)
    if any(other.startswith(f"{name}.") for other in known):
        raise RequestError(400, f"{name} must be an object", param=name)
    if name not in known:
        raise unknown_field(name, known)
    if isinstance(value, Mapping):
        raise RequestError(400, f"{name} must not be an object", param=name)
    if isinstance(value, str | list) and len(value) > MAX_FIELD_LEN:
        raise RequestError(400, f"{name} has more than {MAX_FIELD_LEN} items", param=name)
