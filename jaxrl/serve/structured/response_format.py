"""The field response_format: text, any JSON object, or JSON of a schema."""

from typing import Any

from jaxrl.http.errors import RequestError
from jaxrl.serve.structured.grammar import GrammarCompiler, JsonGrammar, missing_compiler

PARAM = "response_format"


def read_response_format(value: Any, compiler: GrammarCompiler | None) -> JsonGrammar | None:
    """The grammar of a response_format; None for text. Raises RequestError (400)."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = {"type": "object"}
    elif kind == "json_schema":
        schema = _schema(value.get("json_schema"))
    else:
        raise _invalid("must be an object with the type text, json_object or json_schema")
    if compiler is None:
        raise missing_compiler(PARAM)
    return compiler.compile(schema, param=PARAM)


def _schema(value: Any) -> dict[str, Any]:
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, dict):
        raise _invalid('of type json_schema needs json_schema: {"name": ..., "schema": {...}}')
    return schema


def _invalid(reason: str) -> RequestError:
    return RequestError(400, f"{PARAM} {reason}", param=PARAM)
