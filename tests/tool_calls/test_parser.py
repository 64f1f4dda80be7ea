"""Tests of jaxrl/tool_calls: parser.py, formats.py and calls.py."""

import json
from typing import Any

import pytest

from jaxrl.tool_calls.calls import MalformedCall, ToolCall, openai_form, template_form
from jaxrl.tool_calls.formats import FORMATS, tool_format
from jaxrl.tool_calls.parser import ToolParser, parse_turn

DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    "<｜tool▁calls▁begin｜>"
    '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
HERMES = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
QWEN3_CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
HARMONY = (
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
    "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>"
)
HARMONY_RECEIVER_FIRST = (
    "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
    '{"a": 1, "b": 2}<|call|>'
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"
)
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
)
GLM_ARGUMENT = "<arg_key>a</arg_key><arg_value>1</arg_value>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
PARALLEL = {  # each calls add(a=1, b=2), then now()
    "hermes": ("hermes", HERMES),
    "hermes list": (
        "hermes",
        '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now"}]</tool_call>',
    ),
    "llama3": (
        "llama3",
        '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}',
    ),
    "llama3 tag": (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}'
        '<|python_tag|>{"name": "now", "parameters": {}}',
    ),
    "mistral": (
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}, '
        '{"name": "now", "arguments": "{}"}]',
    ),
    "mistral 11": (
        "mistral",
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]now{}',
    ),
    "qwen3_coder": ("qwen3_coder", QWEN3_CODER),
    "harmony": ("harmony", HARMONY),
    "harmony with the receiver first": ("harmony", HARMONY_RECEIVER_FIRST),
    "glm 4.5": ("glm", GLM),
    "glm 4.7": ("glm", GLM.replace("\n", "")),
    "kimi": ("kimi", KIMI),
    "gemma4": (
        "gemma4",
        "<|tool_call>call:add{a:1,b:2}<tool_call|><|tool_call>call:now{}<tool_call|>",
    ),
    "deepseek": ("deepseek", DEEPSEEK),
    "deepseek 3.1": ("deepseek", DEEPSEEK_V31),
}


def parse(text, name="hermes", **options):
    return parse_turn(text, FORMATS[name], **options)


@pytest.mark.parametrize("case", PARALLEL)
def test_parallel_calls_of_every_format(case):
    name, text = PARALLEL[case]
    turn = parse(text, name, tools=[ADD])
    ids = ("functions.add:0", "functions.now:1") if name == "kimi" else ("call00000", "call00001")
    expected = (ToolCall("add", {"a": 1, "b": 2}, ids[0]), ToolCall("now", {}, ids[1]))
    assert (turn.content, turn.attempts) == ("", expected)


@pytest.mark.parametrize("case", PARALLEL)
@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_gives_the_same_calls_and_no_part_of_a_marker_as_content(case, size):
    name, call = PARALLEL[case]
    before = "" if name == "llama3" and "tag" not in case else "Let me see: 1 < 2.\n\n"
    parser = ToolParser(FORMATS[name])
    text = before + call
    parts = [parser.add(text[i : i + size]) for i in range(0, len(text), size)] + [parser.finish()]
    assert "".join(part.content for part in parts) == before.strip()
    assert [a.name for part in parts for a in part.calls] == ["add", "now"]
    if (
        name in ("hermes", "deepseek", "qwen3_coder", "glm", "kimi", "gemma4")
        and "list" not in case
    ):
        first = next(i for i, part in enumerate(parts) if part.attempts)
        assert len(parts[first].attempts) == 1 and first < len(parts) - 1  # once it is complete


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text", ["", "  \n", "No call.\n", "a <too", "3 < 4 [TOOL", "<｜tool", '{"answer": 5}', "{x"]
)
def test_text_without_a_call_is_content(name, text):
    turn = parse(text, name)
    assert (turn.content, turn.attempts) == (text, ())
    parser = ToolParser(FORMATS[name])
    assert "".join(parser.add(c).content for c in text) + parser.finish().content == text


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {</tool_call>', "not valid JSON"),
        ("hermes", "<tool_call></tool_call>", "not valid JSON"),
        ("hermes", "<tool_call>[]</tool_call>", "no call between"),
        ("hermes", "<tool_call>5</tool_call>", "not a JSON object but 5"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "but [1]"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "not valid JSON"),
        ("hermes", '<tool_call>{"name": "f"} and more</tool_call>', "Extra data at character 14"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}', "is no text"),
        ("hermes", "<tool_call>" + "[" * 100_000, "nested more than 64 deep"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "not valid JSON"),  # cut off
        ("llama3", '{"name": "f", "parameters": {"a": }}', "not valid JSON"),
        ("llama3", "<|python_tag|>print(5)", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]add", "not followed by arguments"),
        ("mistral", '[TOOL_CALLS][{"name": "f"', "not valid JSON"),
        ("deepseek", "<｜tool▁call▁begin｜>add{}<｜tool▁call▁end｜>", "is missing"),
        ("kimi", "<|tool_call_begin|>functions.add:0{}<|tool_call_end|>", "is missing"),
        (
            "kimi",
            "<|tool_call_begin|>add<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "'add' is not functions.NAME:NUMBER",
        ),
        ("glm", "<tool_call><arg_key>a</arg_key></tool_call>", "the name of the tool"),
        ("glm", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "is not <arg_key>KEY"),
        ("glm", "<tool_call>f<arg_key>a</arg_key>1</tool_call>", "is not <arg_key>KEY"),
        ("glm", f"<tool_call>f{2 * GLM_ARGUMENT}</tool_call>", "the argument a occurs twice"),
        ("glm", f"<tool_call>f{GLM_ARGUMENT[:-5]}</tool_call>", "does not end with </arg_value>"),
    ],
)
def test_a_malformed_call_has_its_reason(name, text, reason):
    (attempt,) = parse(text, name).attempts
    assert isinstance(attempt, MalformedCall) and reason in attempt.reason


def test_a_malformed_call_leaves_the_others():
    turn = parse("<tool_call>{</tool_call>" + HERMES)
    assert [call.name for call in turn.calls] == ["add", "now"]
    assert [call.id for call in turn.attempts] == ["call00000", "call00001", "call00002"]
    mixed = parse('<tool_call>[{"name": "add"}, 5]</tool_call>')
    assert (len(mixed.calls), len(mixed.malformed)) == (1, 1)


def test_content_around_calls_is_kept():
    assert parse(f"First.\n{HERMES}\nThen.").content == "First.\nThen."


def test_a_call_in_the_reasoning_is_content():
    thought = f"<think>I could write {HERMES}.</think>"
    turn = parse(f"{thought}\n\n{HERMES}")
    assert (turn.content, len(turn.calls)) == (thought, 2)
    opened = parse(f"Perhaps {HERMES}</think>Done.", in_thought=True)
    assert opened.calls == () and opened.content.endswith("Done.")


def test_ids_of_the_model_are_kept():
    listed = parse('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc123def"}]', "mistral")
    named = parse("[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}", "mistral")
    assert listed == named and listed.calls[0] == ToolCall("f", {}, "abc123def")


@pytest.mark.parametrize("size", [1, 5, 400])
def test_a_turn_of_harmony_keeps_its_reasoning_as_text(size):
    thought = "<|channel|>analysis<|message|>I call to=functions.add.<|end|>"
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": "<|call|>"}'
    answer = "<|channel|>final<|message|>It is 3."
    parser = ToolParser(FORMATS["harmony"])
    text = f"{thought}<|start|>assistant{call}"  # without <|call|>, which ends the response
    parts = [parser.add(text[i : i + size]) for i in range(0, len(text), size)] + [parser.finish()]
    assert "".join(part.content for part in parts) == thought
    found = [attempt for part in parts for attempt in part.attempts]
    assert found == [ToolCall("add", {"a": "<|call|>"}, "call00000")]
    text = f"{thought}<|start|>assistant{answer}"
    turn = parse(text, "harmony")
    assert (turn.content, turn.attempts) == (text, ())
    (malformed,) = parse("<|start|>assistant to=functions.add {}", "harmony").malformed
    assert malformed.reason == "<|message|> is missing"


def test_a_call_in_the_forms_of_templates_and_of_the_api():
    call = ToolCall("f", {"city": "Zürich"}, "call00000")
    assert template_form(call)["function"]["arguments"] == {"city": "Zürich"}
    form = openai_form(call)
    assert json.loads(form["function"]["arguments"]) == {"city": "Zürich"}
    assert (form["id"], form["type"], form["function"]["name"]) == ("call00000", "function", "f")


def test_the_format_follows_from_the_chat_template():
    llama = '<|start_header_id|>ipython ... \'{"name": "\' + name + \'", "parameters": \''
    templates = {
        "hermes": "in <tool_call></tool_call> tags",
        "llama3": llama,
        "mistral": '{{ "[TOOL_CALLS] [" }}',
        "harmony": "{{ '<|start|>assistant to=functions.' + call.name + '<|call|>' }}",
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1",
        "glm": "<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>",
        "kimi": "<|tool_calls_section_begin|>{{ '<|tool_call_begin|>' + call['id'] }}",
        "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
        "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type']}}",
    }
    for name, template in templates.items():
        assert tool_format(template).name == name
    assert tool_format("", "mistral").name == "mistral"
    with pytest.raises(ValueError, match="no known format"):
        tool_format("<|im_start|>{{ message.content }}")
    with pytest.raises(ValueError, match="no known format"):
        tool_format("<tool_call><function=f>{}")
    with pytest.raises(ValueError, match="'qwen' is not one of auto, hermes"):
        tool_format("", "qwen")
