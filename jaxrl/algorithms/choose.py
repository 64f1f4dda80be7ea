"""Picks a function out of a literal table by the name a config gives."""

from collections.abc import Mapping


def choose[T](table: Mapping[str, T], name: str, key: str) -> T:
    """The entry `name` of `table`; `key` is the config key that holds the name.

    Raises ValueError, with the known names, for any other.
    """
    if name not in table:
        raise ValueError(
            f"config.{key} = {name!r} is not known; set one of {', '.join(map(repr, table))}"
        )
    return table[name]
