"""Rows of the algorithm tables: looking one up by its configured name, and calling it.

A name with a colon, "file.py:ROW" or "package.module:ROW?option=value", is a row of the user.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxrl.config.keys import AlgorithmConfig, PreferenceConfig
from jaxrl.config.plugins import load_object, options
from jaxrl.config.schema import is_import_path


@runtime_checkable
class Row(Protocol):
    """The fields of every row of an algorithm table. Each table adds its preconditions."""

    @property
    def function(self) -> Callable[..., Any]: ...

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that the function takes, in the order of its arguments."""
        ...

    @property
    def hyper_parameters(self) -> tuple[str, ...]:
        """Keys of the config's section that the function takes as keyword-only arguments."""
        ...


def lookup[T](table: Mapping[str, T], name: str, key: str) -> T:
    """The entry `name` of `table`; `key` is the config key that holds the name.

    Raises ValueError with the known names for an unknown one, and the errors of `user_row`.
    """
    if name in table:
        return table[name]
    if is_import_path(name):
        return user_row(type(next(iter(table.values()))), name, key)
    raise ValueError(
        f"config.{key} = {name!r} is not known; set one of {', '.join(map(repr, table))}"
    )


@functools.cache
def user_row[T](kind: type[T], spec: str, key: str) -> T:
    """The row of the user at "file.py:ROW"; options after "?" are arguments of its function.

    Raises ValueError if the file cannot be imported, or has no row of this kind with that name.
    """
    row: Any = load_object(
        spec,
        spec,
        key=f"config.{key}",
        kind=f"{kind.__name__} ({kind.__module__})",
        is_kind=lambda value: isinstance(value, kind),
    )
    given = options(spec)
    return (
        dataclasses.replace(row, function=functools.partial(row.function, **given))
        if given
        else row
    )


def apply(row: Row, inputs: Mapping[str, Any], cfg: AlgorithmConfig | PreferenceConfig) -> Any:
    """Calls the function of `row` with the inputs and the hyper-parameters that the row names."""
    hyper_parameters = {name: getattr(cfg, name) for name in row.hyper_parameters}
    return row.function(*(inputs[name] for name in row.inputs), **hyper_parameters)
