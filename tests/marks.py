"""Which cases of a parametrized test run by default, and which are thorough or slow."""

from collections.abc import Iterable

import pytest


def graded(values: Iterable, *, default: Iterable = (), thorough: Iterable | None = None) -> list:
    """Parameters: those in `default` are not marked, those in `thorough` are, the others are slow.

    Without `thorough`, all that are not in `default` are thorough.
    """
    values, default = list(values), list(default)
    thorough = values if thorough is None else list(thorough)
    for value in (*default, *thorough):
        assert value in values, value

    def mark(value):
        if value in default:
            return ()
        return pytest.mark.thorough if value in thorough else pytest.mark.slow

    return [_param(value, mark(value)) for value in values]


def _param(value, marks):
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
