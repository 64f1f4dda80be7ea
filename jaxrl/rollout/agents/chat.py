"""Requests of agents: the fields that a training run reads, and the bodies of chat completions.

Requests in another dialect are translated to chat completions first.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.data.chat.row_messages import tools_of
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.images.references import has_images
from jaxrl.http.dialects.turn import EndOfTurn, TurnPiece
from jaxrl.http.errors import RequestError
from jaxrl.http.fields import IGNORED, unknown_field
from jaxrl.http.openai import read_messages, read_object, read_stop, response_head, usage
from jaxrl.json_text import Json, Message, json_size
from jaxrl.rewards.calls import is_score
from jaxrl.types import ImageInput

MODEL = "policy"  # the name in responses; requests may name any model
MAX_VALUES = 1 << 20  # JSON values of a body
MAX_TOOLS, MAX_TOOLS_SIZE = 512, 512 << 10  # tools of a request, and characters of all of them
MAX_CHOICES = 128
READ = (
    *("logprobs", "max_completion_tokens", "max_tokens", "messages", "model", "n"),
    *("parallel_tool_calls", "stop", "stream", "stream_options", "tool_choice", "tools"),
)
# Fields that are accepted and change nothing: the run sets the sampling.
RUN_FIELDS = (
    *("frequency_penalty", "logit_bias", "min_p", "min_tokens", "presence_penalty"),
    *("repetition_penalty", "seed", "temperature", "top_k", "top_p", *IGNORED),
)
# Fields that would change the meaning of a response, with the values that have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template_kwargs": ({},),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}
REASONS = {
    "chat_template_kwargs": "set data.template_kwargs",
    "reasoning_effort": "set data.template_kwargs",
    "response_format": "a grammar would change the distribution that the run samples from",
    "tool_choice": "a grammar would change the distribution that the run samples from",
    "top_logprobs": "the engine of a run computes the logprobs of sampled tokens only",
}


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """The request of an agent."""

    messages: tuple[Message, ...]  # with IMAGE at the places of images
    role: str = MODEL  # the conversation's name, `model` of the body
    images: tuple[ImageInput, ...] = ()  # of the messages, in order
    tools: tuple[Json, ...] = ()
    size: int = 0  # characters of the messages and tools with all of their fields, about
    may_call: bool = True  # False with tool_choice="none"
    max_tokens: int | None = None  # None: the rest of the context
    parallel: bool = True  # whether a turn may have several calls
    stop: tuple[str, ...] = ()
    n: int = 1  # turns that are sampled, each in its own branch
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    splits_reasoning: bool = False  # the reasoning of a turn is apart from its content


@dataclasses.dataclass(frozen=True)
class Reply:
    """One turn of the model, as the agent sees it."""

    message: Json  # in OpenAI's form, with `reasoning_content` if the request splits it
    finish: str  # "stop" | "length", of the engine
    n_prompt_tokens: int
    n_tokens: int
    logprobs: tuple[Json, ...] = ()  # by token, if requested
    stop_string: str = ""  # of the request, that ended it

    @property
    def piece(self) -> TurnPiece:
        """The turn for the writer of another dialect."""
        return TurnPiece(
            self.message.get("reasoning_content", ""),
            self.message["content"] or "",
            self.logprobs,
            tuple(self.message.get("tool_calls", ())),
        )

    @property
    def end(self) -> EndOfTurn:
        return EndOfTurn(self.finish, self.n_prompt_tokens, self.n_tokens, self.stop_string)


def parse_chat(raw: bytes, reader: ImageReader | None = None) -> ChatRequest:
    """The request of a body of /chat/completions. Raises RequestError (400) if it is invalid.

    `reader` reads the images of messages; None refuses them.
    """
    return chat_request(read_object(raw, max_values=MAX_VALUES), reader)


def chat_request(body: Mapping[str, Any], reader: ImageReader | None = None) -> ChatRequest:
    """The request of the fields of a body. Raises RequestError (400) if it is invalid."""
    body = {name: value for name, value in body.items() if value is not None}
    _check_names(body)
    options = body.get("stream_options") or {}
    marked, images = _read_images(body.get("messages"), reader)
    messages, tools = tuple(read_messages(marked)), _tools(body)
    return ChatRequest(
        messages=messages,
        role=str(body.get("model", MODEL)),
        images=images,
        tools=tools,
        size=json_size([messages, tools]),
        may_call=body.get("tool_choice") != "none",
        max_tokens=_max_tokens(body),
        parallel=body.get("parallel_tool_calls") is not False,
        stop=read_stop(body.get("stop")),
        n=_integer(body, "n", MAX_CHOICES) or 1,
        logprobs=body.get("logprobs") is True,
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


def chat_completion(replies: Sequence[Reply]) -> Json:
    """The body of a response, with a choice for each reply."""
    choices = [
        {"message": reply.message, **_choice(i, _finish_reason(reply), reply.logprobs)}
        for i, reply in enumerate(replies)
    ]
    return response_head("chat.completion", MODEL) | {"choices": choices, "usage": _usage(replies)}


def chat_chunks(replies: Sequence[Reply], *, include_usage: bool) -> Iterator[Json]:
    """The chunks of a stream. A turn comes whole: it is sent when all of them have ended."""
    head = response_head("chat.completion.chunk", MODEL)
    for i, reply in enumerate(replies):
        delta = dict(reply.message)
        if "tool_calls" in delta:
            calls = enumerate(delta["tool_calls"])
            delta["tool_calls"] = [{"index": k} | call for k, call in calls]
        yield head | {"choices": [{"delta": delta, **_choice(i, None, reply.logprobs)}]}
        yield head | {"choices": [{"delta": {}, **_choice(i, _finish_reason(reply))}]}
    if include_usage:
        yield head | {"choices": [], "usage": _usage(replies)}


def _usage(replies: Sequence[Reply]) -> Json:
    return usage(replies[0].n_prompt_tokens, sum(reply.n_tokens for reply in replies))


def _finish_reason(reply: Reply) -> str:
    called = reply.finish == "stop" and "tool_calls" in reply.message
    return "tool_calls" if called else reply.finish


def _choice(index: int, finish: str | None, logprobs: Sequence[Json] = ()) -> Json:
    shown = {"content": list(logprobs), "refusal": None} if logprobs else None
    return {"index": index, "logprobs": shown, "finish_reason": finish}


def _check_names(body: Mapping[str, Any]) -> None:
    """Raises RequestError for fields that are not read, unless their values have no effect."""
    for name, value in body.items():
        if name in UNSUPPORTED:
            if not any(value == v and type(value) is type(v) for v in UNSUPPORTED[name]):
                reason = REASONS.get(name, "leave it out")
                raise RequestError(
                    400,
                    f"{name}={value!r:.100} is not supported during training: {reason}",
                    param=name,
                )
        elif name not in READ and name not in RUN_FIELDS:
            raise unknown_field(name, (*READ, *RUN_FIELDS))


def _read_images(messages: Any, reader: ImageReader | None) -> tuple[Any, tuple[ImageInput, ...]]:
    """(the messages with IMAGE at the places of images, these images).

    Raises RequestError (400) for images that cannot be used, and if the run reads text.
    """
    turns = (
        [turn for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    )
    if reader is None:
        if any(has_images(turn.get("content")) for turn in turns):
            raise RequestError(
                400, "the run reads text: images of agents need data.images=True", param="messages"
            )
        return messages, ()
    try:
        return reader.read_messages(messages)
    except ValueError as error:
        raise RequestError(400, str(error), param="messages") from error


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
    found = [_integer(body, name) for name in ("max_completion_tokens", "max_tokens")]
    return next((n for n in found if n is not None), None)


def _integer(body: Mapping[str, Any], name: str, most: int | None = None) -> int | None:
    """The value of a field of a number above 0, and up to `most`; None if it is not set."""
    if (value := body.get(name)) is None:
        return None
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or value < 1 or (most is not None and value > most):
        shown, limit = json.dumps(value)[:100], "" if most is None else f" and up to {most}"
        raise RequestError(400, f"{name}={shown} is no integer above 0{limit}", param=name)
    return value
