"""Validation of tools, in OpenAI's function schema, and of the arguments of calls.

Parameters are JSON Schema 2020-12. Schemas come from clients, datasets and MCP servers, so their
size and depth are limited before they are checked.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.exceptions import Unresolvable

from jaxrl.json_text import json_size, parse_json
from jaxrl.tool_calls.calls import shortened

MAX_TOOL_SIZE = 128 << 10  # characters of a tool; checking them takes up to half a second
_MAX_NAME = 128  # characters
_MAX_TYPES = 7  # that JSON Schema has
# Drafts whose keywords 2020-12 has too, except those in _REPLACED.
_DRAFTS = ("draft-06/schema", "draft-07/schema", "draft/2019-09/schema", "draft/2020-12/schema")
_REPLACED = {"additionalItems": "items", "dependencies": "dependentRequired or dependentSchemas"}
_SCHEMAS_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_SCHEMAS = (
    *("additionalProperties", "allOf", "anyOf", "contains", "contentSchema", "else", "if", "items"),
    *("not", "oneOf"),
    *("prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
_NO_PARAMETERS = {"type": "object", "properties": {}}


def check_tool(tool: Any) -> dict[str, Any]:
    """The tool {"type": "function", "function": {"name", "description", "parameters"}}, checked.

    A function schema without the outer object gets it. Raises ValueError with the reason: no name,
    too large, or parameters that are no JSON schema of an object.
    """
    try:
        json_size(tool, max_size=MAX_TOOL_SIZE)
    except ValueError as error:
        raise ValueError(f"a tool is not accepted: {error}; shorten its schema") from error
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
    schema.pop("$schema", None)
    known = schema.get("properties", {})
    if "$ref" not in schema and "patternProperties" not in schema:
        schema.setdefault("additionalProperties", False)
    try:
        error = best_match(_validator(schema).iter_errors(dict(arguments)))
    except (Unresolvable, RecursionError, ValueError) as failure:  # ValueError: no valid URI
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
        text = json.dumps(parameters)
    except TypeError as error:
        raise ValueError(f"the parameters of the tool {name!r} are no JSON ({error})") from error
    if reason := _schema_error(text):
        raise ValueError(f"the parameters of the tool {name!r} {reason}")


@functools.lru_cache(maxsize=256)  # agents and clients send their tools again with every request
def _schema_error(text: str) -> str:
    """Why a JSON text is not an accepted schema; "" if it is."""
    schema = parse_json(text)
    try:
        if reason := _unsupported(schema):
            return reason
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        place = ".".join(map(str, error.absolute_path)) or "the schema"
        return f"are no valid JSON schema: {place}: {shortened(error.message)}"
    except RecursionError:
        return "are nested too deeply"
    except OverflowError as error:  # of a regular expression
        return f"have a pattern that is no regular expression ({error})"
    return ""


def _unsupported(schema: Any) -> str:
    """The part of a schema that its check would misread or take too long for; "" if none."""
    for part in _subschemas(schema):
        draft = part.get("$schema", _DRAFTS[-1])
        if not isinstance(draft, str) or not draft.rstrip("#").endswith(_DRAFTS):
            return (
                f"have the $schema {_shown(draft)}; write them in JSON Schema 2020-12 and leave "
                "$schema out"
            )
        for old, new in _REPLACED.items():
            if old in part:
                return f"have {old!r}, which JSON Schema 2020-12 does not have; use {new}"
        types = part.get("type")
        if isinstance(types, list) and len(types) > _MAX_TYPES:
            return f"have {len(types)} types in one place; JSON has {_MAX_TYPES}"
    return ""


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it, but not the values in it, such as those of enum."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            yield part
            parts += [part[name] for name in _SCHEMAS if name in part]
            named = [part.get(name) for name in _SCHEMAS_BY_NAME]
            parts += [inner for one in named if isinstance(one, dict) for inner in one.values()]


def _validator(schema: Mapping[str, Any]) -> Validator:
    """A validator that follows references within the schema only: it opens no file or URL."""
    return Draft202012Validator(schema, registry=Registry())


def _shown(value: Any) -> str:
    try:
        return shortened(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return shortened(repr(value))
