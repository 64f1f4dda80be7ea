"""Request bodies of OpenAI's Responses API, as the chat requests that they are equivalent to."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.http.errors import RequestError
from jaxrl.http.fields import IGNORED, unknown_field, unsupported_field
from jaxrl.json_text import Json

SAME = (  # fields that the chat endpoint has by the same name
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stream",
    "top_logprobs",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    *IGNORED,
)
CHAT_NAMES = {  # of the other fields
    "input": "messages",
    "max_output_tokens": "max_completion_tokens",
    "text": "response_format",
}
RESPONSES_NAMES = {chat: name for name, chat in CHAT_NAMES.items()}
NO_EFFECT: dict[str, tuple[Any, ...]] = {  # unsupported fields, with the values that are accepted
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "truncation": ("disabled",),
}
LOGPROBS = "message.output_text.logprobs"
NEVER_SENT = "reasoning.encrypted_content"  # reasoning is a part of the text
OTHER = ("include", "instructions", "tool_choice", "tools")
TEXT_PARTS = ("input_text", "output_text", "text")


def chat_of_responses(body: Mapping[str, Any]) -> Json:
    """The body of a chat completion with the meaning of a body of /v1/responses.

    Raises RequestError (400) with the name of a field that has no equivalent.
    """
    present = {name: value for name, value in body.items() if value is not None}
    _check_names(present)
    return _chat_body(present)


@contextlib.contextmanager
def responses_names() -> Iterator[None]:
    """Names the field of an error as this endpoint does, if the chat endpoint's name differs."""
    try:
        yield
    except RequestError as error:
        error.param = RESPONSES_NAMES.get(error.param or "", error.param)
        raise


def _check_names(body: Json) -> None:
    known = (*SAME, *CHAT_NAMES, *OTHER)
    for name, value in body.items():
        if name in NO_EFFECT and value not in NO_EFFECT[name]:
            raise unsupported_field(name)
        if name not in known and name not in NO_EFFECT:
            raise unknown_field(name, known)


def _chat_body(body: Json) -> Json:
    chat = {name: body[name] for name in SAME if name in body}
    chat["messages"] = _messages(body.get("input"), body.get("instructions"))
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if (response_format := _response_format(body.get("text"))) is not None:
        chat["response_format"] = response_format
    if "tools" in body:
        chat["tools"] = _tools(body["tools"])
    if "tool_choice" in body:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    include = body.get("include", [])
    if not isinstance(include, list) or any(i not in (LOGPROBS, NEVER_SENT) for i in include):
        raise RequestError(400, f"include accepts a list of {LOGPROBS} only", param="include")
    return chat | {"logprobs": LOGPROBS in include or "top_logprobs" in body}


def _messages(value: Any, instructions: Any) -> list[Json]:
    """The chat messages of an input: text, or a list of messages, calls and their outputs."""
    if not isinstance(instructions, str | None):
        raise RequestError(400, "instructions must be a string", param="instructions")
    messages: list[Json] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise _invalid_input("must be a string or a non-empty list of items")
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append(_message(item))
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = {"role": "tool", "content": _content(item.get("output"))}
            messages.append(output | {"tool_call_id": item.get("call_id")})
        else:
            raise _invalid_input(
                "has an item that is no message, function_call or function_call_output"
            )
    return messages


def _message(item: Json) -> Json:
    role = item.get("role")
    if not isinstance(role, str):
        raise _invalid_input("has a message without a role")
    return {
        "role": "system" if role == "developer" else role,
        "content": _content(item.get("content")),
    }


def _content(content: Any) -> Any:
    """The content with its parts in the form of the chat endpoint, which checks the rest."""
    return list(map(_part, content)) if isinstance(content, list) else content


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXT_PARTS:
        return part | {"type": "text"}
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise _invalid_input("has an image with a file_id; send its image_url")
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    return part


def _response_format(text: Any) -> Any:
    """`text.format`, whose schema is not nested, as a response_format."""
    chosen = text.get("format") if isinstance(text, dict) else None
    if text is not None and (not isinstance(text, dict) or set(text) - {"format", "verbosity"}):
        raise RequestError(400, 'text must be an object: {"format": {"type": ...}}', param="text")
    if isinstance(chosen, dict) and chosen.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": chosen}
    return chosen


def _tools(tools: Any) -> Any:
    """Tools, whose function is not nested, in the chat endpoint's form, which checks the rest."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": t.get("type"), "function": {k: v for k, v in t.items() if k != "type"}}
        if isinstance(t, dict)
        else t
        for t in tools
    ]


def _tool_choice(choice: Any) -> Any:
    return {"function": choice} if isinstance(choice, dict) else choice


def repeated_fields(body: Mapping[str, Any]) -> Json:
    """The fields of the response object that repeat those of the request."""
    defaults = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
    }
    set_fields = {name: body[name] for name in defaults if body.get(name) is not None}
    return (
        defaults
        | set_fields
        | {
            "background": False,
            "previous_response_id": None,
            "store": False,  # nothing of a response is kept
            "truncation": "disabled",
        }
    )


def _invalid_input(reason: str) -> RequestError:
    return RequestError(400, f"input {reason}", param="input")
