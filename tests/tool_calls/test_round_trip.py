"""Calls of every format, written as chat templates write them, are read in any pieces."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from jaxrl.tool_calls.formats import FORMATS
from jaxrl.tool_calls.gemma4_calls import QUOTE
from jaxrl.tool_calls.parser import ToolParser
from jaxrl.tool_calls.schema import check_tool

# Markers and escapes of all formats, whole and cut, of which texts are made.
PIECES = (
    *("a", "Zürich", " ", "\n", '"', "'", "\\", "{", "}", "[", "]", ":", ",", ";", "1", "null"),
    *("<tool_call>", "</tool_call>", "<parameter=b>", "<arg_key>", "</think>", "[TOOL_CALLS]"),
    *("<function=g>", "</arg_key>", "<|tool_call_end|>", "<｜tool▁call▁end｜>", "<|call|>"),
)
ENDS = {  # of a text value, which the value itself cannot have
    "qwen3_coder": ("</parameter>", "<parameter=b>"),
    "glm": (),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "items": {"type": "array"},
        "flag": {"type": "boolean"},
        "more": {"type": "object"},
    },
}
TOOLS = [check_tool({"name": name, "parameters": SCHEMA}) for name in ("find", "note_it")]
Arguments = dict[str, Any]


def shown(value: Any) -> str:
    """A value of a format whose arguments are text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def compact(arguments: Arguments) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def hermes(name: str, arguments: Arguments, i: int) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {compact(arguments)}}}\n</tool_call>\n'


def llama3(name: str, arguments: Arguments, i: int) -> str:
    return f'<|python_tag|>{{"name": "{name}", "parameters": {compact(arguments)}}}'


def mistral(name: str, arguments: Arguments, i: int) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{compact(arguments)}"


def deepseek(name: str, arguments: Arguments, i: int) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{compact(arguments)}<｜tool▁call▁end｜>"


def qwen3_coder(name: str, arguments: Arguments, i: int) -> str:
    each = "".join(
        f"<parameter={key}>\n{shown(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{each}</function>\n</tool_call>\n"


def harmony(name: str, arguments: Arguments, i: int) -> str:
    start = "<|start|>assistant" if i else ""
    return (
        f"{start}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{compact(arguments)}<|call|>"
    )


def glm(name: str, arguments: Arguments, i: int) -> str:
    each = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{shown(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{each}</tool_call>\n"


def kimi(name: str, arguments: Arguments, i: int) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{compact(arguments)}"
        "<|tool_call_end|>"
    )


def gemma4(name: str, arguments: Arguments, i: int) -> str:
    return f"<|tool_call>call:{name}{_gemma4(arguments)}<tool_call|>"


def _gemma4(value: Any) -> str:
    if isinstance(value, str):
        return QUOTE + value + QUOTE
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma4(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma4, value)) + "]"
    return json.dumps(value)


WRITERS: dict[str, Callable[[str, Arguments, int], str]] = {
    f.__name__: f
    for f in (hermes, llama3, mistral, deepseek, qwen3_coder, harmony, glm, kimi, gemma4)
}


def test_every_format_has_a_writer():
    assert set(WRITERS) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_calls_are_read_as_they_are_written_in_any_pieces(name, seed):
    rng = random.Random(f"{name} {seed}")
    for _ in range(40):
        calls = [random_call(rng, name) for _ in range(rng.randint(1, 3))]
        text = "".join(WRITERS[name](*call, i) for i, call in enumerate(calls))
        parser, at, found = ToolParser(FORMATS[name], tools=TOOLS), 0, []
        while at < len(text):
            size = rng.choice((1, 3, 10, 1000))
            found.append(parser.add(text[at : at + size]))
            at += size
        found.append(parser.finish())
        assert "".join(part.content for part in found) == "", text
        read = [(call.name, call.arguments) for part in found for call in part.calls]
        assert read == calls, text


def random_call(rng: random.Random, name: str) -> tuple[str, Arguments]:
    arguments = {
        "text": random_text(rng, name),
        "count": rng.randint(-9, 99),
        "items": [rng.randint(0, 9), "x"],
        "flag": rng.random() < 0.5,
        "more": {"b": None, "c": random_text(rng, name)},
    }
    kept = rng.sample(sorted(arguments), rng.randint(0, len(arguments)))
    return rng.choice(TOOLS)["function"]["name"], {key: arguments[key] for key in kept}


def random_text(rng: random.Random, name: str) -> str:
    text = "".join(rng.choices(PIECES, k=rng.randint(0, 6)))
    for end in ENDS.get(name, ()):
        text = text.replace(end, "")
    return text
