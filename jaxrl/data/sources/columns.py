"""Column mapping: reads the columns of a dataset under the names that jaxrl knows."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.choices import (
    COMPLETION_COLUMNS,
    CONVERSATION_COLUMNS,
    PROMPT_COLUMNS,
    SYSTEM_COLUMNS,
    TRUTH_COLUMNS,
)

_GROUPS = (  # a mapped name hides the others of its group
    {*PROMPT_COLUMNS, *CONVERSATION_COLUMNS},
    {*TRUTH_COLUMNS, *COMPLETION_COLUMNS},
    {*SYSTEM_COLUMNS},
)


def map_columns(row: dict[str, Any], columns: Sequence[str], place: str) -> dict[str, Any]:
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
