"""Tests of jaxrl/tool_calls/gemma4_calls.py: values, ends of calls, malformed calls, reasoning."""

import time

import pytest

from jaxrl.tool_calls.formats import FORMATS
from jaxrl.tool_calls.gemma4_calls import QUOTE
from jaxrl.tool_calls.parser import parse_turn

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"


def parse(body: str, before: str = "", after: str = ""):
    return parse_turn(f"{before}{OPEN}{body}{CLOSE}{after}", FORMATS["gemma4"])


def quoted(text: str) -> str:
    return QUOTE + text + QUOTE


VALUES = [
    (quoted("Zürich"), "Zürich"),
    (quoted(""), ""),
    (quoted('a "b" \\n {c:1}, [d]\n'), 'a "b" \\n {c:1}, [d]\n'),
    (quoted(CLOSE), CLOSE),
    ("12", 12),
    ("-1.5e3", -1500.0),
    ("true", True),
    ("False", False),
    ("None", None),
    ("[]", []),
    (f"[1,{quoted('x')},{{b:null}}]", [1, "x", {"b": None}]),
    (f"{{b:{{c_d:{quoted('e')}}}, {quoted('f g')}:2}}", {"b": {"c_d": "e"}, "f g": 2}),
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_a_value_is_read_by_its_form(text, value):
    turn = parse(f"call:f{{a:{text}}}", before="Now: ", after=" then")
    assert [(call.name, call.arguments) for call in turn.calls] == [("f", {"a": value})]
    assert turn.content == "Now: then" and not turn.malformed


@pytest.mark.parametrize(
    "body",
    ["", "f{}", "call:f", "call:{}", "call:f{a:word}", "call:f{a}", "call:f{a:1", 'call:f{"a":1}'],
)
def test_another_form_is_malformed(body):
    turn = parse(body)
    assert not turn.calls and len(turn.malformed) == 1 and turn.content == OPEN + body + CLOSE


def test_a_call_in_the_reasoning_is_text():
    thought = f"<|channel>thought\n{OPEN}call:f{{}}{CLOSE}<channel|>"
    turn = parse("call:g{}", before=thought)
    assert [call.name for call in turn.calls] == ["g"] and turn.content == thought


def test_an_unfinished_string_ends_the_call_at_the_first_marker():
    turn = parse(f"call:f{{a:{QUOTE}b}}", after="rest")
    assert len(turn.malformed) == 1 and turn.content.endswith("rest")


def test_a_long_call_is_read_in_linear_time():
    start = time.perf_counter()
    for body in ("[" * 20_000, "a:" * 20_000, QUOTE * 20_001, "b" * 40_000):
        parse(f"call:f{{a:{body}}}")
    assert time.perf_counter() - start < 5
