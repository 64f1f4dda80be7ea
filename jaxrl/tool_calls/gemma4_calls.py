"""Tool calls of Gemma 4: an object whose keys have no quotes and whose strings have a marker.

    <|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>

Text between two markers is literal: nothing in it is escaped.
"""

import json
import re
from typing import Any

from jaxrl.tool_calls.calls import shortened

QUOTE = '<|"|>'
THOUGHT = ("<|channel>", "<channel|>")  # markers of the model's reasoning
_CALL = re.compile(r"\s*call:([^\s{}]+)\s*(\{.*\})\s*", re.DOTALL)
_QUOTED = re.escape(QUOTE) + r"(?P<text>.*?)" + re.escape(QUOTE)
_BARE = r'(?P<bare>[^\s{}\[\],:"<]++)(?P<key>(?=\s*:))?'
_TOKEN = re.compile(rf"\s*(?:{_QUOTED}|{_BARE}|(?P<mark>[{{}}\[\],:]))\s*", re.DOTALL)
# Chat templates write true, false and null as Python's values.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def read_gemma4(text: str) -> list[Any]:
    """One call, with its arguments as JSON text. Raises ValueError for another form."""
    found = _CALL.fullmatch(text)
    if not found:
        raise ValueError("the call has not the form call:NAME{key:value}")
    return [{"name": found[1], "arguments": _as_json(found[2])}]


def _as_json(text: str) -> str:
    """The object with quoted keys and strings. Values of other words stay: JSON has no such."""
    parts, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if not token:
            raise ValueError(
                f"{shortened(text[at:])!r} is neither a value, a bracket nor {QUOTE}text{QUOTE}"
            )
        at = token.end()
        if token["text"] is not None:
            parts.append(json.dumps(token["text"]))
        elif token["key"] is not None:
            parts.append(json.dumps(token["bare"]))
        else:
            parts.append(token["mark"] or _PYTHON.get(token["bare"], token["bare"]))
    return " ".join(parts)
