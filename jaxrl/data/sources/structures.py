"""Columns that hold a structure as JSON text: messages, history, extra_info, reward_model.

Files without nested types (CSV exports, pandas' object columns) store them so.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl.config.choices import (
    COMPLETION_COLUMNS,
    CONVERSATION_COLUMNS,
    PROMPT_COLUMNS,
    TRUTH_COLUMNS,
)
from jaxrl.json_text import parse_json

_MESSAGES = {*PROMPT_COLUMNS, *CONVERSATION_COLUMNS, *COMPLETION_COLUMNS, "chosen", "rejected"}
_MESSAGES -= {*TRUTH_COLUMNS}  # an answer is compared as the text that it is
_OBJECTS = ("extra_info", "reward_model")
# The text of a list of messages, also as Python prints it
_LIST_OF_MESSAGES = re.compile(r"""\s*(\[\s*)?\{\s*['"](role|from|content|value)['"]\s*:""")


def parse_structures(row: dict[str, Any], place: str) -> dict[str, Any]:
    """The row with the values of such columns in place of their JSON text.

    Raises ValueError with the place for text that begins as such a value and is no JSON.
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
