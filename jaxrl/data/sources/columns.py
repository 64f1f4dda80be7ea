"""Columns of a dataset, read under the names that jaxrl knows.

Files without nested types (CSV exports, pandas' object columns) store structures, such as messages,
history, extra_info or reward_model, as JSON text, which is parsed.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.choices import (
    COMPLETION_COLUMNS,
    CONVERSATION_COLUMNS,
    PROMPT_COLUMNS,
    SYSTEM_COLUMNS,
    TRUTH_COLUMNS,
)
from jaxrl.json_text import parse_json

_GROUPS = (  # a mapped name hides the others of its group
    {*PROMPT_COLUMNS, *CONVERSATION_COLUMNS},
    {*TRUTH_COLUMNS, *COMPLETION_COLUMNS},
    {*SYSTEM_COLUMNS},
)
_MESSAGES = {*PROMPT_COLUMNS, *CONVERSATION_COLUMNS, *COMPLETION_COLUMNS, "chosen", "rejected"}
_MESSAGES -= {*TRUTH_COLUMNS}  # an answer is compared as the text that it is
_OBJECTS = ("extra_info", "reward_model")
# The text of a list of messages, also as Python prints it
_LIST_OF_MESSAGES = re.compile(r"""\s*(\[\s*)?\{\s*['"](role|from|content|value)['"]\s*:""")


def read_columns(row: dict[str, Any], columns: Sequence[str], place: str) -> dict[str, Any]:
    """The row under the names of data.columns, with structures in place of their JSON text.

    Raises ValueError with the place for a mapped column that the row does not have, and for text
    that begins as a structure and is not JSON.
    """
    return _parse_structures(_map_columns(row, columns, place), place)


def _map_columns(row: dict[str, Any], columns: Sequence[str], place: str) -> dict[str, Any]:
    """The row with the entries 'name:column' of data.columns read under their names.

    Other columns keep their names, except those that have the meaning of a mapped name: with
    'prompt:input', a column `messages` is not read. Raises ValueError with the columns of the row
    if it has none of those that are mapped to a name.
    """
    if not columns:
        return row
    pairs = [entry.split(":", 1) for entry in columns]
    found: dict[str, Any] = {}
    for name, column in pairs:
        if name not in found and (value := _lookup(row, column)) is not _ABSENT:
            found[name] = value
    for name, _ in pairs:
        if name not in found:
            wanted = " or ".join(column for other, column in pairs if other == name)
            raise ValueError(
                f"{place} has no column {wanted} to read as {name}, as data.columns says; it has "
                f"the columns {', '.join(row) or 'none'}; correct data.columns"
            )
    mapped = set(found)
    hidden = set().union(*(group for group in _GROUPS if group & mapped))
    return {name: value for name, value in row.items() if name not in hidden} | found


def first(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of the columns `names` that the row has a value for; "" if it has none."""
    return next((name for name in names if row.get(name) is not None), "")


def names(row: Mapping[str, Any]) -> str:
    """Names of the non-empty columns of a row."""
    return ", ".join(name for name, value in row.items() if value is not None) or "none"


_ABSENT = object()


def _lookup(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a dotted path into columns of structures."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _parse_structures(row: dict[str, Any], place: str) -> dict[str, Any]:
    """The row with structures in place of their JSON text.

    Raises ValueError with the place for text that begins as a structure and is no JSON.
    """
    found = {
        name: _parsed(value, name, place)
        for name, value in row.items()
        if isinstance(value, str) and _is_structure(name, value)
    }
    for name in _OBJECTS:
        value = found.get(name, row.get(name))
        # The name of a reward model is text; it reaches the rewards with the other columns
        is_other = name == "reward_model" and isinstance(value, str)
        if value not in (None, "") and not isinstance(value, Mapping) and not is_other:
            raise ValueError(
                f"{place}: {name} is {repr(value)[:80]}, not an object; store an object or its "
                "JSON text, or rename the column"
            )
    return row | found if found else row


def _is_structure(name: str, text: str) -> bool:
    if name in _MESSAGES:
        return _LIST_OF_MESSAGES.match(text) is not None
    return (name in _OBJECTS and text.lstrip()[:1] == "{") or (
        name == "history" and text.lstrip()[:1] == "["
    )


def _parsed(text: str, name: str, place: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"{place}: {name} is text that begins as a list or an object and is not JSON ({error}):"
            f" {text[:60]!r}; write it as JSON (Python's json.dumps, not str), or as a list"
        ) from error
