"""Tool calls of a model turn: what the parsers return, and the forms that others read."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_SHOWN = 200  # characters of a malformed call in error messages


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that could be read. Whether the tool exists and accepts it is not checked."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclasses.dataclass(frozen=True)
class MalformedCall:
    """Text that starts as a call and is none."""

    text: str  # between the markers of the format
    reason: str
    id: str


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """A model turn, or the part of it that one piece of a stream completes."""

    content: str = ""  # text and reasoning without the calls
    attempts: tuple[ToolCall | MalformedCall, ...] = ()  # in the order of the text

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(a for a in self.attempts if isinstance(a, ToolCall))

    @property
    def malformed(self) -> tuple[MalformedCall, ...]:
        return tuple(a for a in self.attempts if isinstance(a, MalformedCall))


def call_ids() -> Iterator[str]:
    """Ids of nine letters and digits, which Mistral's templates require; equal in every turn."""
    n = 0
    while True:
        yield f"call{n:05d}"
        n += 1


def template_form(call: ToolCall) -> dict[str, Any]:
    """The call in an assistant message for a chat template: the arguments are an object."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def calls_of(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The calls of an assistant message in the form of `template_form`."""
    functions = [(call["function"], call.get("id", "")) for call in message.get("tool_calls", ())]
    return tuple(ToolCall(f["name"], f["arguments"], call_id) for f, call_id in functions)


def openai_form(call: ToolCall) -> dict[str, Any]:
    """The call as OpenAI's API returns it: the arguments are JSON text."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def parse_json(text: str) -> Any:
    """The JSON value in the text. Raises ValueError with the position of the error."""
    value, end = parse_json_prefix(text)
    if rest := text[end:].strip():
        raise ValueError(f"text after the JSON value: {shortened(rest)}")
    return value


def parse_json_prefix(text: str) -> tuple[Any, int]:
    """The JSON value that the text starts with, and where it ends. Raises ValueError."""
    start = len(text) - len(text.lstrip())
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not valid JSON ({error.msg} at character {error.pos - start})"
        ) from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def read_call(value: Any) -> tuple[str, dict[str, Any], str]:
    """Name, arguments and id ("" if absent) of a call written as a JSON object.

    The arguments are in "arguments" or "parameters", as an object or as its JSON text, and may be
    absent. Raises ValueError for another form.
    """
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {shortened(json.dumps(value))}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('the object has no "name" with the name of a tool')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments are not an object but {shortened(json.dumps(arguments))}")
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # half of a surrogate pair
        raise ValueError(f"a string in the arguments is no text ({error})") from error
    call_id = value.get("id")
    return name, arguments, call_id if isinstance(call_id, str) else ""


def shortened(text: str) -> str:
    """The text for an error message."""
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject)
