"""Chat messages and tools in the rows of a dataset: their text, tool calls, and what is refused.

Tool calls have OpenAI's form, {"type": "function", "function": {"name", "arguments"}}, in the
messages of the assistant; results are messages of the role "tool". The chat template renders both.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.choices import PROMPT_COLUMNS
from jaxrl.data.sources.columns import first
from jaxrl.tools.schema import check_tool
from jaxrl.types import Message

MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")  # verl's and TRL's names
_REASONING = ("reasoning_content", "thinking", "reasoning")  # DeepSeek's, gpt-oss's, vLLM's name

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # other names are the roles themselves


def prompt_of(
    row: Mapping[str, Any], place: str, names: Sequence[str] = PROMPT_COLUMNS
) -> tuple[Message, ...] | None:
    """The messages of the first of the columns `names` that the row has; None if it has none.

    An `instruction` is followed by the text of the column `input`, as in Alpaca's schema.
    """
    if not (column := first(row, names)):
        return None
    value, context = row[column], row.get("input")
    if column == "instruction" and isinstance(value, str) and isinstance(context, str):
        value = f"{value}\n{context}".rstrip("\n")
    return as_messages(value, column, place)


def as_messages(value: Any, column: str, place: str) -> tuple[Message, ...]:
    """The messages in a column: a list of messages, or a string, which is one user message.

    The content of a message is a string or a list of text parts, {"type": "text", "text": ...},
    which are joined. Raises ValueError with the place for anything else.
    """
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    try:
        found = [as_message(m) for m in value] if isinstance(value, list) else []
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    messages = tuple(m for m in found if m is not None)
    if not messages or len(messages) < len(found):
        raise ValueError(
            f"{place}: {column} is neither a string nor a list of messages "
            f"{{role, content}} with text contents, but {shortened(value)}; jaxrl trains on text "
            "only"
        )
    return messages


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
    return message | {"tool_calls": [tool_call(call) for call in calls]} if calls else message


def tool_call(call: Any) -> dict[str, Any]:
    """A call whose arguments are an object: chat templates write them as JSON.

    OpenAI's API has the arguments as JSON text. Raises ValueError for another form.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name, arguments = (
        (function.get("name"), function.get("arguments"))
        if isinstance(function, Mapping)
        else (None, None)
    )
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError(
            f"the tool call {shortened(call)} is not of the form "
            '{"function": {"name": ..., "arguments": {...}}}; correct the row'
        )
    found = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return found | ({"id": call["id"]} if call.get("id") else {})


def tools_of(row: Mapping[str, Any], place: str) -> tuple[dict[str, Any], ...]:
    """The tools that the model may call: the column `tools`, a list or JSON text.

    Raises ValueError unless every tool is {"type": "function", "function": {"name", ...}} with a
    JSON schema of its arguments. None in an object is a field that other rows of the file have.
    """
    value = row.get("tools") or ()
    tools = _json(value) if isinstance(value, str) else value
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(
            f"{place}: tools is {shortened(value)}, not a list of "
            '{"type": "function", "function": {"name", "description", "parameters"}}'
        )
    try:
        return tuple(check_tool(_without_none(tool)) for tool in tools)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(v) for key, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def joined_text(parts: list[Any]) -> str | None:
    """The text of a list of content parts; None if one of them is not text."""
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ]
    return "".join(texts) if len(texts) == len(parts) else None


def check_text_only(row: Mapping[str, Any], place: str) -> None:
    """Raises ValueError if the row has an image, a video or audio."""
    if found := [name for name in MEDIA_COLUMNS if row.get(name)]:
        raise ValueError(
            f"{place} has a value in the column {found[0]}, and jaxrl trains on text only; remove "
            "the column if the text alone is the task, else use rows without it"
        )


def shortened(value: Any) -> str:
    """The value for an error message, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
