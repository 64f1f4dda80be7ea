"""Chat completions of agents: the fields that a training run reads, and the response bodies."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.data.chat.row_messages import tools_of
from jaxrl.http.errors import RequestError
from jaxrl.http.openai import read_messages, read_object, read_stop, response_head, usage
from jaxrl.json_text import Json, Message, json_size
from jaxrl.rewards.calls import is_score

MODEL = "policy"  # the name in responses; requests may name any model
MAX_VALUES = 1 << 20  # JSON values of a body
MAX_TOOLS, MAX_TOOLS_SIZE = 512, 512 << 10  # tools of a request, and characters of all of them
# Fields that would change the meaning of a response, with the values that have no effect. All other
# fields are ignored: the run sets the sampling.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "functions": (None, []),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
}


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """The request of an agent."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    size: int = 0  # characters of the messages and tools with all of their fields, about
    may_call: bool = True  # False with tool_choice="none"
    max_tokens: int | None = None  # None: the rest of the context
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


@dataclasses.dataclass(frozen=True)
class Reply:
    """One turn of the model, as the agent sees it."""

    message: Json  # in OpenAI's form
    finish: str  # "stop" | "length" | "tool_calls"
    n_prompt_tokens: int
    n_tokens: int


def parse_chat(raw: bytes) -> ChatRequest:
    """The request of a body of /chat/completions. Raises RequestError (400) if it is invalid."""
    body = read_object(raw, max_values=MAX_VALUES)
    for name, values in UNSUPPORTED.items():
        if name in body and not any(body[name] == v for v in values):
            raise RequestError(
                400,
                f"{name}={body[name]!r:.100} is not supported during training; leave it out",
                param=name,
            )
    options = body.get("stream_options") or {}
    messages, tools = tuple(read_messages(body.get("messages"))), _tools(body)
    return ChatRequest(
        messages=messages,
        tools=tools,
        size=json_size([messages, tools]),
        may_call=body.get("tool_choice") != "none",
        max_tokens=_max_tokens(body),
        stop=read_stop(body.get("stop")),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
    )


def parse_reward(raw: bytes) -> dict[str, float]:
    """The numbers of a body of /reward: "reward" and counts. Raises RequestError (400)."""
    body = read_object(raw, max_values=MAX_VALUES)
    numbers = {
        name: value
        for name, value in body.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if "reward" not in body or len(numbers) < len(body):
        raise RequestError(
            400, 'the body must be an object of numbers with the key "reward"', param="reward"
        )
    for name, value in numbers.items():
        if not is_score(value):
            raise RequestError(400, f"{name} must be a number within float32's range", param=name)
    return {name: float(value) for name, value in numbers.items()}


def chat_completion(reply: Reply) -> Json:
    """The body of a response."""
    choice = {"message": reply.message, **_choice(reply.finish)}
    return response_head("chat.completion", MODEL) | {
        "choices": [choice],
        "usage": usage(reply.n_prompt_tokens, reply.n_tokens),
    }


def chat_chunks(reply: Reply, *, include_usage: bool) -> Iterator[Json]:
    """The chunks of a stream. The turn comes whole: it is sent when it has ended."""
    head = response_head("chat.completion.chunk", MODEL)
    delta = dict(reply.message)
    if "tool_calls" in delta:
        calls = enumerate(delta["tool_calls"])
        delta["tool_calls"] = [{"index": i} | call for i, call in calls]
    yield head | {"choices": [{"delta": delta, **_choice(None)}]}
    yield head | {"choices": [{"delta": {}, **_choice(reply.finish)}]}
    if include_usage:
        yield head | {"choices": [], "usage": usage(reply.n_prompt_tokens, reply.n_tokens)}


def _choice(finish: str | None) -> Json:
    return {"index": 0, "logprobs": None, "finish_reason": finish}


def _tools(body: Mapping[str, Any]) -> tuple[Json, ...]:
    tools = body.get("tools")
    try:
        if isinstance(tools, str):
            raise ValueError("tools is a string, not a list")
        if isinstance(tools, list) and len(tools) > MAX_TOOLS:
            raise ValueError(f"there are {len(tools)} tools, and {MAX_TOOLS} are accepted")
        if (size := json_size(tools)) > MAX_TOOLS_SIZE:
            raise ValueError(f"the tools have {size} characters; {MAX_TOOLS_SIZE} are accepted")
        return tools_of(body, "the request")
    except ValueError as error:
        raise RequestError(400, str(error), param="tools") from error


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := body.get(name)) is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            shown = json.dumps(value)[:100]
            raise RequestError(400, f"{name}={shown} is no number of tokens above 0", param=name)
        return value
    return None
