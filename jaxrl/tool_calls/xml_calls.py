"""Tool calls as XML, whose arguments are text.

Qwen3-Coder, Qwen3.5          GLM-4.5 to 4.7, with or without line breaks

    <tool_call>                   <tool_call>NAME
    <function=NAME>               <arg_key>KEY</arg_key>
    <parameter=KEY>               <arg_value>VALUE</arg_value>
    VALUE                         </tool_call>
    </parameter>
    </function>
    </tool_call>

The schema of the tool says which arguments are text and which are JSON.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.tool_calls.calls import parse_json, shortened

_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_KEY = re.compile(r"\s*<parameter=([^<>\n]+)>")
_GLM_NAME = re.compile(r"\s*([^<>\s]+)\s*")
_GLM_KEY = re.compile(rf"\s*<arg_key>([^<>\n]+)</arg_key>\s*{VALUE}")
# Chat templates write true, false and null as Python's values.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


class XmlCallEnd:
    """Finds the marker that ends a call: the first one that is not in the value of a parameter.

    `opening` and `closing` are around values. If a parameter does not end, the first marker of all
    ends the call. The time is linear in the text, however it arrives.
    """

    def __init__(self, marker: str, opening: str = _PARAMETER, closing: str = _END_PARAMETER):
        self._marker, self._opening, self._closing = marker, opening, closing
        self._outside = re.compile(f"{re.escape(marker)}|{re.escape(opening)}")
        self._in_parameter = False
        self._n_read = 0

    def find(self, text: str, start: int, *, final: bool) -> int | None:
        """As `CallEnd.find`."""
        at = start + self._n_read
        while True:
            if self._in_parameter:
                end = text.find(self._closing, at)
                if end < 0:
                    break
                at, self._in_parameter = end + len(self._closing), False
            found = self._outside.search(text, at)
            if not found:
                break
            if found[0] == self._marker:
                return found.start()
            at, self._in_parameter = found.end(), True
        n_held = max(map(len, (self._marker, self._opening, self._closing))) - 1
        self._n_read = max(at, len(text) - n_held) - start
        if not final:
            return None
        return text.find(self._marker, start) if self._in_parameter else -1


def read_xml(text: str) -> list[Any]:
    """One call, with the text of every argument. Raises ValueError for another form."""
    function = _FUNCTION.fullmatch(text)
    if not function:
        raise ValueError("the call has not the form <function=NAME>...</function>")
    body, at, arguments = function[2], 0, {}
    while key := _KEY.match(body, at):
        end = body.find(_END_PARAMETER, key.end())
        value = body[key.end() : end]
        if end < 0 or _PARAMETER in value:
            raise ValueError(f"the argument {key[1]} does not end with {_END_PARAMETER}")
        if key[1] in arguments:
            raise ValueError(f"the argument {key[1]} occurs twice")
        arguments[key[1]] = value.removeprefix("\n").removesuffix("\n")
        at = end + len(_END_PARAMETER)
    if rest := body[at:].strip():
        raise ValueError(f"{shortened(rest)!r} is not <parameter=KEY>VALUE{_END_PARAMETER}")
    return [{"name": function[1].strip(), "arguments": arguments}]


def read_glm(text: str) -> list[Any]:
    """One call of GLM, with the text of every argument. Raises ValueError for another form."""
    name = _GLM_NAME.match(text)
    if not name:
        raise ValueError("the call does not begin with the name of the tool")
    at, arguments = name.end(), {}
    while key := _GLM_KEY.match(text, at):
        end = text.find(END_VALUE, key.end())
        value = text[key.end() : end]
        if end < 0 or VALUE in value:
            raise ValueError(f"the argument {key[1]} does not end with {END_VALUE}")
        if key[1] in arguments:
            raise ValueError(f"the argument {key[1]} occurs twice")
        arguments[key[1]] = value
        at = end + len(END_VALUE)
    if rest := text[at:].strip():
        raise ValueError(
            f"{shortened(rest)!r} is not <arg_key>KEY</arg_key>{VALUE}VALUE{END_VALUE}"
        )
    return [{"name": name[1], "arguments": arguments}]


def typed_arguments(
    name: str, texts: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The arguments with the types that the tool's schema gives them.

    A string stays as it is written. Other types are JSON; where a string is allowed too, a text
    that is not JSON of one of them is the string. Arguments that the schema does not describe, and
    those of unknown tools, are text. Raises ValueError for other text, and for unknown types.
    """
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    schema = (functions[0].get("parameters") or {}) if functions else {}
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
    return {
        key: _typed(key, text, _types(known.get(key, rest), schema)) for key, text in texts.items()
    }


def _typed(key: str, text: str, types: set[str]) -> Any:
    """The value of the text as one of the types; none means that the schema has no type."""
    if unknown := types - _TYPES.keys():
        raise ValueError(
            f"the argument {key} has the unknown type {sorted(unknown)[0]!r} in the tool's schema; "
            f"JSON Schema has {', '.join(_TYPES)}"
        )
    if not types or types == {"string"}:
        return text
    try:
        value = parse_json(_PYTHON.get(text.strip(), text))
    except ValueError as error:
        if "string" in types:
            return text
        wanted = " or ".join(sorted(types))
        raise ValueError(f"the argument {key} must be of the type {wanted}: {error}") from error
    return text if "string" in types and not _is_of(value, types - {"string"}) else value


def _is_of(value: Any, types: set[str]) -> bool:
    """Whether a JSON value is of one of the types. Python's bool is an int, JSON's is no number."""
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _TYPES[name]) for name in types)


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The types that a part of a schema allows; none if it names none.

    Those of alternatives, of listed values, and of the definitions in `root` that it refers to.
    """
    found: set[str] = set()
    parts, seen = [schema], set()
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            continue
        own = part.get("type", ())
        found |= {own} if isinstance(own, str) else set(own)
        values = [*part.get("enum", ()), *([part["const"]] if "const" in part else [])]
        if not own:
            found |= {name for name in _TYPES for value in values if _is_of(value, {name})}
        parts += [one for kind in ("anyOf", "oneOf", "allOf") for one in part.get(kind, ())]
        reference = part.get("$ref")
        if reference and reference not in seen:
            seen.add(reference)
            parts.append(_definition(reference, root))
    return found


def _definition(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of a schema at "#/$defs/NAME" or another path in it; None if there is none."""
    part: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        part = part.get(name) if isinstance(part, Mapping) else None
    return part if reference.startswith("#") else None
