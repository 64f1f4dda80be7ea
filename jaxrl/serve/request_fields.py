"""Fields of the request bodies: OpenAI's, vLLM's extensions, and those that are not supported."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.config.schema import build, flatten, key, keys, nearest, to_dict
from jaxrl.serve.errors import RequestError
from jaxrl.serve.score import N_TOP

# Unsupported fields of OpenAI and vLLM, with the values that have no effect and are accepted.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": (),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": (),
    "response_format.type": ("text",),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
UNTYPED = ("messages", "prompt", "stop")  # fields of several types, parsed in request.py


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    include_usage: bool = key(False, "send the token counts in a final chunk")


@dataclasses.dataclass(frozen=True)
class Fields:
    """Fields of both endpoints: OpenAI's, then vLLM's."""

    model: str = key("", "served model name; '' accepts any")
    max_tokens: int = key(0, "response tokens; default: the rest of the context (chat) or 16", ge=0)
    temperature: float = key(1.0, "softmax temperature; 0 = greedy", ge=0)
    top_p: float = key(
        1.0, "nucleus sampling: the most likely tokens with this total probability", gt=0, le=1
    )
    n: int = key(1, "choices per prompt", ge=1)
    seed: int = key(0, "random seed; default: a new one per request")
    stream: bool = key(False, "send the response as server-sent events")
    stream_options: StreamOptions = dataclasses.field(default_factory=StreamOptions)
    top_k: int = key(0, "sample from the k most likely tokens; 0 or -1 = off", ge=-1)
    min_p: float = key(
        0.0,
        "minimum probability of a token, relative to that of the most likely one",
        ge=0,
        le=1,
    )
    stop_token_ids: tuple[int, ...] = key((), "token ids that end a response", ge=0)
    ignore_eos: bool = key(False, "generate max_tokens tokens, ignoring stop tokens")
    return_token_ids: bool = key(False, "return the token ids of prompt and response")


@dataclasses.dataclass(frozen=True)
class ChatFields(Fields):
    max_completion_tokens: int = key(0, "OpenAI's newer name of max_tokens", ge=0)
    logprobs: bool = key(False, "return the logprob of every token")
    top_logprobs: int = key(
        0, "return the logprobs of this many most likely tokens", ge=0, le=N_TOP
    )


@dataclasses.dataclass(frozen=True)
class CompletionFields(Fields):
    logprobs: int = key(
        0,
        "return the logprob of every token, and those of this many most likely tokens",
        ge=0,
        le=N_TOP,
    )
    echo: bool = key(False, "return the prompt in front of the response")


def read_fields[F: Fields](schema: type[F], body: Any, model: str) -> tuple[F, dict[str, Any]]:
    """(typed fields with defaults, the values that the body sets by dotted name).

    Raises RequestError if the body is no JSON object, has an unknown or unsupported field, a value
    of the wrong type or range, or names a model other than `model`.
    """
    if not isinstance(body, Mapping):
        raise RequestError(400, "the body of the request must be a JSON object")
    known = keys(schema)
    present = {}
    for name, value in flatten({k: v for k, v in body.items() if k not in UNTYPED}).items():
        field = name.split(".")[0]
        if value is None or field in IGNORED or value in UNSUPPORTED.get(name, ()):
            continue
        if field in UNSUPPORTED:
            raise RequestError(
                400, f"{field} is not supported by this server; leave it out", param=field
            )
        if name not in known:
            guess = nearest(name, known)
            hint = f"; did you mean {guess}?" if guess else ""
            raise RequestError(400, f"unknown field {name}{hint}", param=name)
        present[name] = value
    fields, errors = build(schema, flatten(to_dict(schema())) | present)
    if errors:
        raise RequestError(400, "; ".join(errors))
    if fields.model not in ("", model):
        raise RequestError(
            404,
            f"the model {fields.model!r} is not served here; use {model!r}",
            param="model",
            code="model_not_found",
        )
    return fields, present
