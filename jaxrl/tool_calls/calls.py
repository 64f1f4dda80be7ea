"""Tool calls of a model turn: what the parsers return, and the forms that others read."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl import json_text
from jaxrl.json_text import json_size

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

    text: str  # between the markers of the format; the turn's content has it, with the markers
    reason: str
    id: str


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """A model turn, or the part of it that one piece of a stream completes."""

    content: str = ""  # text and reasoning without the calls that could be read
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
    with _explained():
        return json_text.parse_json(text)


def parse_json_values(text: str, separators: str) -> list[Any]:
    """The JSON values in a text, between any number of `separators`. Raises ValueError."""
    with _explained():
        return json_text.parse_json_values(text, separators=separators)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raises the errors of the JSON reader with a message for the model."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at character {error.pos})") from error
    except ValueError as error:
        raise ValueError(f"not accepted as JSON: {error}") from error


def read_call(value: Any) -> tuple[str, dict[str, Any], str]:
    """Name, arguments and id ("" if absent) of a call written as a JSON object.

    The arguments are in "arguments" or "parameters", as an object or as its JSON text. None are
    absent, null, or text without characters. Raises ValueError for another form.
    """
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {shortened(json.dumps(value))}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('the object has no "name" with the name of a tool')
    arguments = read_arguments(value.get("arguments", value.get("parameters")))
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except ValueError as error:  # half of a surrogate pair
        raise ValueError(f"a string in the arguments is no text ({error})") from error
    call_id = value.get("id")
    return name, arguments, call_id if isinstance(call_id, str) else ""


def read_arguments(value: Any) -> dict[str, Any]:
    """The arguments of a call: an object or its JSON text; {} for null and for blank text.

    Raises ValueError for another form, and for what JSON cannot express.
    """
    if isinstance(value, str):
        value = parse_json(value) if value.strip() else {}
    if value is None:
        return {}
    json_size(value)  # checks it: it may come from a program or a table instead of a text
    if not isinstance(value, Mapping):
        raise ValueError(f"the arguments are not an object but {shortened(repr(value))}")
    return dict(value)


def shortened(text: str) -> str:
    """The text for an error message."""
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
