"""JSON of large responses, in pieces: one call of `json.dumps` stops all threads until it ends."""

import json
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 6  # of the lists that are split: response, output, item, content, part, logprobs
MAX_LEN = 256  # elements of a list that are written at one time


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_pieces(value: Any, depth: int = MAX_DEPTH) -> Iterator[str]:
    """The JSON text of a value. Long lists within `depth` arrays and objects are split."""
    if depth and isinstance(value, dict):
        for i, (name, member) in enumerate(value.items()):
            yield f"{',' if i else '{'}{dump(name)}:"
            yield from json_pieces(member, depth - 1)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) > MAX_LEN:
        for i in range(0, len(value), MAX_LEN):
            yield ("," if i else "[") + dump(value[i : i + MAX_LEN])[1:-1]
        yield "]"
    elif depth and isinstance(value, list):
        for i, element in enumerate(value):
            yield "," if i else "["
            yield from json_pieces(element, depth - 1)
        yield "]" if value else "[]"
    else:
        yield dump(value)
