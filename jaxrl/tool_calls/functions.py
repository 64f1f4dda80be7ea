"""The schema of a Python function that is offered as a tool, from its signature and docstring."""

import importlib
from collections.abc import Callable
from typing import Any

from jaxrl.tool_calls.schema import check_tool


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The tool of a function or bound method with type hints and a docstring with "Args:".

    Raises ValueError if its docstring or signature lacks a type, or the description of an argument.
    """
    # imported late: it takes seconds, and a process without such tools does not need it
    library = importlib.import_module("transformers.utils.chat_template_utils")
    name = getattr(function, "__name__", repr(function))
    try:
        tool = library.get_json_schema(function)
    except Exception as error:  # several types, and whatever the user's annotations raise
        raise ValueError(
            f"the tool {name!r} cannot be described to the model ({error}); give each argument a "
            "type hint and a line 'name: description' under 'Args:' in the docstring"
        ) from error
    tool["function"].get("parameters", {}).get("properties", {}).pop("return", None)
    tool["function"].pop("return", None)
    return check_tool(tool)
