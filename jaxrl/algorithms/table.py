"""Rows of the algorithm tables: looking one up by its configured name, and calling it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxrl.config.keys import AlgorithmConfig


@runtime_checkable
class Row(Protocol):
    """What every row of an algorithm table has. Each table adds the preconditions of its kind."""

    @property
    def function(self) -> Callable[..., Any]: ...

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that the function takes, in the order of its arguments."""
        ...

    @property
    def hyper_parameters(self) -> tuple[str, ...]:
        """Keys of config.algorithm that the function takes as keyword-only arguments."""
        ...


def lookup[T](table: Mapping[str, T], name: str, key: str) -> T:
    """The entry `name` of `table`; `key` is the config key that holds the name.

    Raises ValueError with the known names for an unknown one.
    """
    if name not in table:
        raise ValueError(
            f"config.{key} = {name!r} is not known; set one of {', '.join(map(repr, table))}"
        )
    return table[name]


def apply(row: Row, inputs: Mapping[str, Any], cfg: AlgorithmConfig) -> Any:
    """Calls the function of `row` with the inputs and the hyper-parameters that the row names."""
    hyper_parameters = {name: getattr(cfg, name) for name in row.hyper_parameters}
    return row.function(*(inputs[name] for name in row.inputs), **hyper_parameters)
