"""Tests of jaxrl/tool_calls/xml_calls.py: types of arguments, ends of calls, malformed calls."""

import time
from typing import Any

import pytest

from jaxrl.tool_calls.calls import MalformedCall
from jaxrl.tool_calls.formats import FORMATS
from jaxrl.tool_calls.parser import ToolParser, parse_turn
from jaxrl.tool_calls.schema import arguments_error, check_tool
from jaxrl.tool_calls.xml_calls import typed_arguments

FORMAT = FORMATS["qwen3_coder"]


def tool(**properties) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "$defs": {"size": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    return check_tool({"name": "f", "parameters": parameters})


def call(body: str) -> str:
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


def parameter(value: str, key: str = "a") -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


VALUES = [  # (schema of the argument, text, value)
    ({"type": "string"}, "12", "12"),
    ({"type": "string"}, '"quoted"', '"quoted"'),
    ({"type": "string"}, "None", "None"),
    ({"type": "string"}, "", ""),
    ({"type": "string"}, "  two\n\n  lines\n", "  two\n\n  lines\n"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"type": "integer"}, " 12 ", 12),
    ({"type": "number"}, "-1.5e3", -1500.0),
    ({"enum": [1, 2]}, "1", 1),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "null"}, "None", None),
    ({"type": "array"}, '["a", 1]', ["a", 1]),
    ({"type": "object"}, '{\n "b": {"c": null}\n}', {"b": {"c": None}}),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    ({"type": ["string", "integer"]}, "7", 7),
    ({"type": ["string", "integer"]}, "7a", "7a"),
    ({"type": ["string", "integer"]}, "[7]", "[7]"),
    ({"type": ["string", "integer"]}, "true", "true"),
    ({"type": ["string", "null"]}, "None", None),
    ({"$ref": "#/$defs/size"}, "3", 3),
    ({"$ref": "#/$defs/loop"}, "3", "3"),
    ({}, "3", "3"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_the_schema_gives_an_argument_its_type(schema, text, value):
    offered = tool(a=schema)
    turn = parse_turn(call(parameter(text)), FORMAT, tools=[offered])
    (found,) = turn.calls
    assert (turn.content, found.arguments) == ("", {"a": value})
    assert type(found.arguments["a"]) is type(value)
    if schema and "loop" not in str(schema) and text != "[7]":
        assert arguments_error(offered, found.arguments) == ""


def test_arguments_without_a_schema_are_text():
    body = parameter("1") + parameter("[2]", "b")
    expected = {"a": "1", "b": "[2]"}
    for tools in ([], [tool(c={"type": "integer"})], [check_tool({"name": "f"})]):
        assert parse_turn(call(body), FORMAT, tools=tools).calls[0].arguments == expected
    rest = {"type": "object", "additionalProperties": {"type": "integer"}}
    tools = [check_tool({"name": "f", "parameters": rest})]
    assert parse_turn(call(parameter("1")), FORMAT, tools=tools).calls[0].arguments == {"a": 1}


def test_a_type_that_json_schema_does_not_have_is_named():
    parameters = {"properties": {"a": {"type": "str"}}}
    with pytest.raises(ValueError, match=r"argument a has the unknown type 'str'.*has string"):
        typed_arguments("f", {"a": "1"}, [{"function": {"name": "f", "parameters": parameters}}])


MALFORMED = {  # body of a call -> a part of the reason
    parameter("x"): "argument a must be of the type integer: not valid JSON",
    parameter("1") * 2: "argument a occurs twice",
    parameter("NaN"): "not accepted as JSON",
    "1": "'1' is not <parameter=KEY>VALUE</parameter>",
    parameter("1") + "and 2": "'and 2' is not <parameter=KEY>",
    "<parameter=a>\n1\n": "argument a does not end with </parameter>",
    "<parameter=b>\n1\n" + parameter("2"): "argument b does not end with </parameter>",
    "<parameter=>\n1\n</parameter>": "is not <parameter=KEY>",
    parameter("[" * 100_000): "nested more than 64 deep",
}


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_call_has_its_reason_and_stays_text(body):
    text = f"First {call(body)} then {call(parameter('5'))}"
    turn = parse_turn(text, FORMAT, tools=[tool(a={"type": "integer"})])
    broken = turn.attempts[0]
    assert isinstance(broken, MalformedCall) and MALFORMED[body] in broken.reason
    assert turn.content.startswith(f"First {call(body)}")
    if "does not end" not in MALFORMED[body]:
        assert [found.arguments for found in turn.calls] == [{"a": 5}]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{}</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call><function=f>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><parameter=a>\n1\n</parameter></tool_call>",
    ],
)
def test_a_call_without_a_function_is_malformed(text):
    turn = parse_turn(text, FORMAT)
    assert "has not the form <function=NAME>" in turn.malformed[0].reason
    assert (turn.content, turn.calls) == (text, ())


IN_VALUES = ["a </tool_call> b", "</function>\n</tool_call>", "<tool_call>", "if a < b: {", '"{']


@pytest.mark.parametrize("value", IN_VALUES)
@pytest.mark.parametrize("size", [1, 6, 1000])
def test_markers_in_a_value_are_text_in_a_stream_too(value, size):
    text = f"Two.\n{call(parameter(value))}\n{call(parameter('x'))}\nDone."
    parser = ToolParser(FORMAT, tools=[tool(a={"type": "string"})])
    parts = [parser.add(text[i : i + size]) for i in range(0, len(text), size)] + [parser.finish()]
    calls = [found for part in parts for found in part.calls]
    assert [found.arguments["a"] for found in calls] == [value, "x"]
    assert "".join(part.content for part in parts) == "Two.\nDone."


def test_a_long_value_takes_linear_time():
    start = time.process_time()
    parser = ToolParser(FORMAT)
    parser.add("<tool_call><function=f><parameter=a>")
    for _ in range(5_000):
        parser.add("</para")
    (attempt,) = parser.finish().attempts
    assert isinstance(attempt, MalformedCall) and time.process_time() - start < 20
