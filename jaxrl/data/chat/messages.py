"""Chat messages and tools in the rows of a dataset, and what is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.choices import PROMPT_COLUMNS
from jaxrl.data.sources.columns import first
from jaxrl.tools.messages import Message, as_message, parse_or_none, shown
from jaxrl.tools.schema import check_tool

MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")  # verl's and TRL's names


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
        found = [as_message(_without_none(m)) for m in value] if isinstance(value, list) else []
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    messages = tuple(m for m in found if m is not None)
    if not messages or len(messages) < len(found):
        raise ValueError(
            f"{place}: {column} is neither a string nor a list of messages "
            f"{{role, content}} with text contents, but {shown(value)}; jaxrl trains on text "
            "only"
        )
    return messages


def tools_of(row: Mapping[str, Any], place: str) -> tuple[dict[str, Any], ...]:
    """The tools that the model may call: the column `tools`, a list or JSON text.

    Raises ValueError unless every tool is {"type": "function", "function": {"name", ...}} with a
    JSON schema of its arguments. None in an object is a field that other rows of the file have.
    """
    value = row.get("tools") or ()
    tools = parse_or_none(value) if isinstance(value, str) else value
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(
            f"{place}: tools is {shown(value)}, not a list of "
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


def check_text_only(row: Mapping[str, Any], place: str) -> None:
    """Raises ValueError if the row has an image, a video or audio."""
    if found := [name for name in MEDIA_COLUMNS if row.get(name)]:
        raise ValueError(
            f"{place} has a value in the column {found[0]}, and jaxrl trains on text only; remove "
            "the column if the text alone is the task, else use rows without it"
        )
