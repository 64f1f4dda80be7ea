"""The one reader of JSON that comes from outside: model output, clients, files, other processes."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

Json = dict[str, Any]
Message = Json  # role, content; tool_calls, name, tool_call_id as in OpenAI's API

MAX_DEPTH = 64  # nested arrays and objects
MAX_BYTES = 100_000_000  # the largest header that the safetensors format allows
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKETS = re.compile(r"[\[{]+|[\]}]+")


def parse_json(
    text: str | bytes,
    *,
    max_depth: int = MAX_DEPTH,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    parse_int: Callable[[str], int] | None = None,
    finite: bool = True,
) -> Any:
    """The value of a JSON text; `object_pairs_hook` and `parse_int` are the standard library's.

    Raises ValueError, and nothing else, for malformed text, nesting beyond `max_depth`, and numbers
    that JSON does not have or a float cannot hold (NaN, Infinity, 1e400). With finite=False these
    are floats that are not finite, for callers that judge each number.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        _check_depth(text, max_depth)
        return json.loads(
            text,
            parse_constant=_reject_constant if finite else None,
            parse_float=_finite if finite else None,
            parse_int=parse_int,
            object_pairs_hook=object_pairs_hook,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_json_values(
    text: str, *, separators: str = " \n\r\t", max_depth: int = MAX_DEPTH
) -> list[Any]:
    """The JSON values in a text, between any number of `separators`.

    Raises ValueError as `parse_json` does.
    """
    try:
        _check_depth(text, max_depth)
        values, start = [], _after(text, 0, separators)
        while start < len(text):
            value, end = _DECODER.raw_decode(text, start)
            values.append(value)
            start = _after(text, end, separators)
        return values
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_size(value: Any, *, max_depth: int = MAX_DEPTH, max_size: int | None = None) -> int:
    """About the length of a value as JSON: the characters of its strings, and one per value.

    It also checks a value that did not come from `parse_json`, but from a program or a table:
    raises ValueError if it is nested beyond `max_depth`, larger than `max_size`, or has a number
    that JSON does not have. Only dicts, lists and tuples are opened. The time is bounded by
    `max_size`.
    """
    level, size = [value], 1
    for _ in range(max_depth + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, str):
                size += len(one)
            elif isinstance(one, float) and not math.isfinite(one):
                raise ValueError(f"{one} is no number of JSON")
            elif isinstance(one, dict):
                size += sum(len(key) for key in one if isinstance(key, str))
                inner.extend(one.values())
            elif isinstance(one, list | tuple):
                inner.extend(one)
            if max_size is not None and size + len(inner) > max_size:
                raise ValueError(f"it is larger than {max_size} characters")
        if not inner:
            return size
        level, size = inner, size + len(inner)
    raise ValueError(f"it is nested more than {max_depth} deep")


def shown(value: Any) -> str:
    """The value for an error message, in at most 80 characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."


def _after(text: str, start: int, separators: str) -> int:
    while start < len(text) and text[start] in separators:
        start += 1
    return start


def _check_depth(text: str, max_depth: int) -> None:
    """Raises ValueError if brackets outside of strings nest too deeply; linear in the text."""
    if text.count("[") + text.count("{") <= max_depth:
        return
    depth = 0
    for brackets in _BRACKETS.findall(_STRING.sub("", text)):
        depth += len(brackets) if brackets[0] in "[{" else -len(brackets)
        if depth > max_depth:
            raise ValueError(f"it is nested more than {max_depth} deep")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite)


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError with the file's name and `advice`."""
    try:
        if not path.is_file():
            raise ValueError(f"{path} is not a regular file; {advice}")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"{path} has {size} bytes, more than {MAX_BYTES}; {advice}")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); {advice}") from error
    return parse_object(data, str(path), advice)


def parse_object(data: bytes, name: str, advice: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises ValueError with `name` and `advice`."""
    try:
        value = parse_json(data.decode("utf-8-sig"))  # some editors write a byte order mark
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON ({error}); {advice}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a JSON {type(value).__name__}, not an object; {advice}")
    return value
