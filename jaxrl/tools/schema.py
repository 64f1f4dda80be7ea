"""Validation of tools, in OpenAI's function schema, and of the arguments of calls."""

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from jaxrl.tools.calls import shortened

_MAX_NAME = 128  # characters
_NO_PARAMETERS = {"type": "object", "properties": {}}


def check_tool(tool: Any) -> dict[str, Any]:
    """The tool {"type": "function", "function": {"name", "description", "parameters"}}, checked.

    A function schema without the outer object gets it. Raises ValueError with the reason: no name,
    parameters that are no JSON schema of an object, or a reference to another document.
    """
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise ValueError(
            f"the tool {_shown(tool)} has not the form "
            '{"type": "function", "function": {"name", "description", "parameters"}}'
        )
    if (kind := tool.get("type", "function")) != "function" and function is not tool:
        raise ValueError(f'the tool {name!r} has the type {kind!r}; only "function" is supported')
    if len(name) > _MAX_NAME or not all(c.isalnum() or c in "_-.:/" for c in name):
        raise ValueError(
            f"the tool name {name[:_MAX_NAME]!r} is not made of up to {_MAX_NAME} letters, digits, "
            "'_', '-', '.', ':' and '/'"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise ValueError(f"the description of the tool {name!r} is {_shown(description)}, not text")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_parameters(parameters, name)
    return {"type": "function", "function": dict(function)}


def arguments_error(tool: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Why the arguments of a call do not fit the parameters of a checked tool; "" if they do.

    Names that the schema does not list are an error unless it has additionalProperties or
    patternProperties.
    """
    schema = dict(tool["function"].get("parameters") or _NO_PARAMETERS)
    known = schema.get("properties", {})
    if "$ref" not in schema and "patternProperties" not in schema:
        schema.setdefault("additionalProperties", False)
    try:
        error = best_match(_validator(schema).iter_errors(dict(arguments)))
    except (Unresolvable, RecursionError) as failure:
        return f"the schema of the tool cannot be followed ({failure})"
    if error is None:
        return ""
    if error.validator == "additionalProperties" and not error.absolute_path:
        unknown = [name for name in arguments if name not in known]
        return f"unknown arguments {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
    place = ".".join(map(str, error.absolute_path))
    return shortened(f"{place}: {error.message}" if place else error.message)


def _check_parameters(parameters: Any, name: str) -> None:
    if not isinstance(parameters, Mapping):
        raise ValueError(
            f"the parameters of the tool {name!r} are {_shown(parameters)}, not a JSON schema"
        )
    if parameters.get("type", "object") != "object":
        raise ValueError(
            f"the parameters of the tool {name!r} have the type {_shown(parameters['type'])}; a "
            'tool has named arguments: set {"type": "object", "properties": {...}}'
        )
    try:
        type(_validator(parameters)).check_schema(dict(parameters))
    except SchemaError as error:
        place = ".".join(map(str, error.absolute_path)) or "the schema"
        raise ValueError(
            f"the parameters of the tool {name!r} are no valid JSON schema: {place}: "
            f"{shortened(error.message)}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"the parameters of the tool {name!r} are nested too deeply") from error


def _validator(schema: Mapping[str, Any]) -> Validator:
    """A validator that follows references within the schema only: it opens no file or URL."""
    kind = validator_for(schema, default=Draft202012Validator)
    return kind(schema, registry=Registry())


def _shown(value: Any) -> str:
    try:
        return shortened(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return shortened(repr(value))
