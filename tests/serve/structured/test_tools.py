"""Tests of structured/tools.py and structured/tool_output.py."""

import json

import pytest

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.http.errors import RequestError
from jaxrl.serve.structured.grammar import GrammarCompiler
from jaxrl.serve.structured.tool_output import ToolOutput
from jaxrl.serve.structured.tools import MAX_TOOLS, ToolUse, known_format, read_tools
from jaxrl.tool_calls.formats import FORMATS
from tests.serve.structured.test_grammar import accepts

HERMES = FORMATS["hermes"]


def tool(name, parameters=None):
    function = {"name": name} | ({"parameters": parameters} if parameters else {})
    return {"type": "function", "function": function}


def named(name):
    return {"type": "function", "function": {"name": name}}


def read(known=HERMES, *, parallel=True, **body):
    return read_tools(body, known, parallel=parallel)


def test_the_choice_of_a_tool_sets_the_mode():
    tools = [tool("f"), tool("g")]
    assert read() is None and read(tools=[], tool_choice="auto") is None
    assert read(tools=tools, tool_choice="none") is None
    assert read(tools=tools).mode == "auto" and read(tools=tools).format is HERMES
    required = read(tools=tools, tool_choice="required")
    assert required.mode == "required" and required.format is None
    assert read(tools=tools, tool_choice=named("g")).name == "g"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool("f")] * 2}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool("f", {"type": "object", "title": "x" * (1 << 18)})]}, "tools"),
        ({"tools": [tool("f"), tool("")]}, "tools[1]"),
        ({"tools": [tool("f", {"type": "array"})]}, "tools[0]"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [tool("f")], "tool_choice": named("g")}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": ["auto"]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"function": 5}}, "tool_choice"),
        (
            {
                "tools": [tool("f")],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
        ({"tools": [tool("f")], "known": None}, "tools"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_tools_are_refused_with_the_name_of_the_field(body, param):
    with pytest.raises(RequestError) as refused:
        read(**body)
    assert refused.value.status == 400 and refused.value.param == param


def test_the_format_is_that_of_the_template_unless_it_is_named():
    assert known_format("... <tool_call> ...", "auto") is HERMES
    assert known_format("no tools", "auto") is None
    assert known_format("no tools", "mistral") is FORMATS["mistral"]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


def test_the_grammar_of_a_demanded_call_allows_valid_calls_only(tokenizer):
    compiler = GrammarCompiler(tokenizer, 272, [2])
    f = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]}
    tools = [tool("f", f | {"$defs": {"n": {"enum": [1]}}}), tool("g")]
    tools[1]["function"]["parameters"] = f | {"$defs": {"n": {"enum": [2]}}}

    def allows(text, choice, *, parallel=True):
        use = read(tools=tools, tool_choice=choice, parallel=parallel)
        return accepts(compiler.build(use.grammar(compiler)).result(), tokenizer, text)

    assert allows('{"x": 2}', named("g")) and not allows('{"x": 1}', named("g"))
    assert not allows('{"x": 2, "y": 1}', named("g"))
    one, two = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": {"x": 2}}'
    assert allows(f"[{one}]", "required") and allows(f"[{one}, {two}]", "required")
    assert not allows(f"[{one}, {two}]", "required", parallel=False)
    assert not allows(one.replace("1", "2"), "required") and not allows("[]", "required")
    compiler.close()


def output(use, text, size):
    """(content, calls, finish reason) of text that comes in pieces."""
    found, content, calls = ToolOutput(use), "", []
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for i, piece in enumerate(pieces):
        delta = found.add(piece, ended=i == len(pieces) - 1)
        content, calls = content + delta.content, [*calls, *delta.calls]
    return content, calls, found.finish_reason("stop")


TEXT = (
    'So:\n<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call><tool_call>{x}</tool_call>'
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_are_read_from_pieces_and_malformed_ones_stay_content(size):
    use = ToolUse((tool("f"),), "auto", parallel=True, format=HERMES)
    content, [call], reason = output(use, TEXT, size)
    assert content == "So:<tool_call>{x}</tool_call>" and reason == "tool_calls"
    assert call["index"] == 0 and call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == {"x": "é"}
    many = ToolUse((tool("f"),), "auto", parallel=False, format=HERMES)
    assert len(output(many, TEXT * 2, size)[1]) == 1


@pytest.mark.parametrize("size", [3, 1000])
def test_demanded_calls_are_read_from_json(size):
    text = '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]'
    use = ToolUse((tool("f"), tool("g")), "required", parallel=True)
    content, calls, reason = output(use, text, size)
    assert not content and [c["function"]["name"] for c in calls] == ["f", "g"]
    assert reason == "tool_calls" and calls[1]["index"] == 1
    use = ToolUse((tool("f"),), "named", parallel=True, name="f")
    content, [call], reason = output(use, '{"a": 1}', size)
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'} and reason == "stop"
    assert output(use, '{"a": ', size) == ('{"a": ', [], "stop")  # cut at max_tokens
