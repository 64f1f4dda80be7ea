"""The form of a chat message: role, text and tool calls, as in OpenAI's API.

Tool calls, {"type": "function", "function": {"name", "arguments"}}, are in the messages of the
assistant; results are messages of the role "tool". The chat template renders both.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl.json_text import Message, parse_json, shown
from jaxrl.tool_calls.calls import read_arguments

_REASONING = ("reasoning_content", "thinking", "reasoning")  # DeepSeek's, gpt-oss's, vLLM's name

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # other names are the roles themselves


def as_message(value: Any) -> Message | None:
    """Role, text and tool calls of a message; None if it is not a message with text content."""
    if not isinstance(value, Mapping):
        return None
    role, content = value.get("role"), value.get("content")
    if role is None and isinstance(value.get("from"), str):  # ShareGPT's form
        role, content = SHAREGPT_ROLES.get(value["from"], value["from"]), value.get("value")
    if isinstance(content, list):
        content = joined_text(content)
    calls = value.get("tool_calls")
    if calls and content is None and not value.get("content"):
        content = ""  # a turn may consist of calls only
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    message: Message = {"role": role, "content": content}
    message |= {key: value[key] for key in ("name", "tool_call_id") if value.get(key)}
    reasoning = next((value[key] for key in _REASONING if value.get(key)), None)
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    if calls and not isinstance(calls, list):
        raise ValueError(f"tool_calls is {shown(calls)}, not a list of calls; correct the row")
    return message | {"tool_calls": [tool_call(call) for call in calls]} if calls else message


def tool_call(call: Any) -> dict[str, Any]:
    """A call whose arguments are an object: chat templates write them as JSON.

    OpenAI's API has the arguments as JSON text. No arguments may be absent, null or blank text.
    Raises ValueError for another form.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ValueError(
            f"the tool call {shown(call)} is not of the form "
            '{"function": {"name": ..., "arguments": {...}}}; correct the row'
        )
    try:
        arguments = read_arguments(function.get("arguments"))
    except ValueError as error:
        raise ValueError(f"the tool call {shown(call)}: {error}; correct the row") from error
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found | ({"id": call["id"]} if call.get("id") else {})


def parse_or_none(text: str) -> Any:
    """The JSON value in the text; None if it is no JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def content_text(content: str | list[Any]) -> str:
    """The text of a message's content, which may be a list of parts. Images have none."""
    return content if isinstance(content, str) else "".join(_texts(content))


def joined_text(parts: list[Any]) -> str | None:
    """The text of a list of content parts; None if one of them is not text."""
    texts = _texts(parts)
    return "".join(texts) if len(texts) == len(parts) else None


def _texts(parts: list[Any]) -> list[str]:
    return [
        part["text"]
        for part in parts
        if isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ]
