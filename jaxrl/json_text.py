"""The one reader of JSON that comes from outside: model output, clients, files, other processes."""

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 64  # nested arrays and objects
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKETS = re.compile(r"[\[{]+|[\]}]+")


def parse_json(text: str | bytes, *, max_depth: int = MAX_DEPTH, finite: bool = True) -> Any:
    """The value of a JSON text.

    Raises ValueError, and nothing else, for malformed text, nesting beyond `max_depth`, and numbers
    that JSON does not have or a float cannot hold (NaN, Infinity, 1e400). With finite=False these
    are floats that are not finite, for callers that judge each number.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        if _is_deeper(text, max_depth):
            raise ValueError(f"it is nested more than {max_depth} deep")
        if not finite:
            return json.loads(text)
        return json.loads(text, parse_constant=_reject_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _is_deeper(text: str, max_depth: int) -> bool:
    """Whether brackets outside of strings nest beyond `max_depth`; linear in the text."""
    if text.count("[") + text.count("{") <= max_depth:
        return False
    depth = 0
    for brackets in _BRACKETS.findall(_STRING.sub("", text)):
        depth += len(brackets) if brackets[0] in "[{" else -len(brackets)
        if depth > max_depth:
            return True
    return False


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value
