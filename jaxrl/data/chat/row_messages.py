"""Chat messages and tools in the rows of a dataset, and what is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.choices import PROMPT_COLUMNS, SYSTEM_COLUMNS
from jaxrl.data.chat.dialects import canonical, is_learned
from jaxrl.data.sources.columns import first
from jaxrl.json_text import Message, shown
from jaxrl.tool_calls.chat_message import as_message, parse_or_none
from jaxrl.tool_calls.schema import check_tool

MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")  # verl's and TRL's names
_MEDIA_PARTS = ("image", "video", "audio", "input_image", "input_audio")  # how their types begin
_NO_MEDIA = (
    "the run reads text; remove it if the text alone is the task. Images are read with "
    "data.images=True, videos and audio are not"
)


def prompt_of(
    row: Mapping[str, Any], place: str, names: Sequence[str] = PROMPT_COLUMNS
) -> tuple[Message, ...] | None:
    """The messages of the first of the columns `names` that the row has; None if it has none.

    As in Alpaca's schema, an `instruction` is followed by the text of the column `input`, and a
    prompt that is text by the turns of `history` before it. The system message is that of the
    column `system`. Raises ValueError with the place.
    """
    if not (column := first(row, names)):
        return None
    value, context = row[column], row.get("input")
    if column == "instruction" and isinstance(value, str) and isinstance(context, str):
        value = f"{value}\n{context}".rstrip("\n")
    messages = as_messages(value, column, place)
    if isinstance(value, str):
        messages = (*_history(row, place), *messages)
    return with_system(messages, row, place)


def columns_of_prompt(row: Mapping[str, Any], column: str) -> list[str]:
    """The columns that prompt_of() reads for the prompt in `column`, and the tools."""
    is_text = isinstance(row.get(column), str)
    further = ("input",) * (column == "instruction" and is_text) + ("history",) * is_text
    names = (column, *further, first(row, SYSTEM_COLUMNS), "tools", "data_source")
    return [name for name in names if row.get(name) is not None]


def columns_of_text(row: Mapping[str, Any], column: str) -> list[str]:
    """The columns of the text of the prompt in `column`, in the order of its turns."""
    if not isinstance(row.get(column), str):
        return [column]
    return ["history", column, *("input",) * (column == "instruction")]


def _history(row: Mapping[str, Any], place: str) -> tuple[Message, ...]:
    """The earlier turns of a prompt: pairs of question and answer, or messages."""
    turns: Any = row.get("history") or []
    if isinstance(turns, list) and all(isinstance(turn, Mapping) for turn in turns):
        return as_messages(turns, "history", place) if turns else ()
    found: list[Message] = []
    for pair in turns if isinstance(turns, list) else [turns]:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise ValueError(
                f"{place}: history has {shown(pair)}; it is a list of [question, answer] or of "
                "messages. Correct the row, or rename the column"
            )
        found += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return tuple(found)


def with_system(
    messages: tuple[Message, ...], row: Mapping[str, Any], place: str
) -> tuple[Message, ...]:
    """The messages after the system message of the row's column `system` or `system_prompt`.

    Raises ValueError if the messages have another one.
    """
    column = first(row, SYSTEM_COLUMNS)
    text = row[column] if column else ""
    if not isinstance(text, str):
        raise ValueError(f"{place}: {column} is {shown(text)}, not text; correct the row")
    if not text.strip():
        return messages
    system: Message = {"role": "system", "content": text}
    found = [m for m in messages if m["role"] == "system"]
    if not found:
        return (system, *messages)
    if [m["content"].strip() for m in found] != [text.strip()]:
        raise ValueError(
            f"{place}: the column {column} and the messages have different system messages; remove "
            "one of them"
        )
    return messages


def as_messages(value: Any, column: str, place: str) -> tuple[Message, ...]:
    """The messages in a column: a list of messages, or a string, which is one user message.

    The content of a message is a string or a list of text parts, {"type": "text", "text": ...},
    which are joined. Raises ValueError with the place for anything else.
    """
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if kind := _first_medium(value):
        raise ValueError(
            f"{place}: {column} has a content part of the type {kind}, and {_NO_MEDIA}"
        )
    try:
        found = (
            [as_message(canonical(_without_none(m))) for m in value]
            if isinstance(value, list)
            else []
        )
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    messages = tuple(m for m in found if m is not None)
    if not messages or len(messages) < len(found):
        raise ValueError(
            f"{place}: {column} is neither a string nor a list of messages "
            f"{{role, content}} with text contents, but {shown(value)}; correct the row, or map "
            "another column with data.columns"
        )
    return messages


def not_learned(value: Any, place: str) -> frozenset[int]:
    """Indices of the messages in a column whose fields exclude them from the loss.

    Raises ValueError with the place for a field that is neither 0 nor 1.
    """
    try:
        messages = enumerate(value) if isinstance(value, list) else ()
        return frozenset(i for i, message in messages if not is_learned(message))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


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
    """Raises ValueError if the row has an image, a video or audio in a column."""
    if found := [name for name in MEDIA_COLUMNS if row.get(name)]:
        raise ValueError(f"{place} has a value in the column {found[0]}, and {_NO_MEDIA}")


def _first_medium(messages: Any) -> str:
    """The type of the first content part that is an image, a video or audio; "" without one."""
    turns = messages if isinstance(messages, list) else ()
    contents = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    kinds = [part.get("type") for part in parts if isinstance(part, Mapping)]
    return next((k for k in kinds if isinstance(k, str) and k.startswith(_MEDIA_PARTS)), "")
