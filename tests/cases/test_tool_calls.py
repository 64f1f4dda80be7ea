"""Tool calls that are easily misread: rows E1 to E5 of the cases, and their relatives."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.serve.structured.tool_output import ToolOutput
from jaxrl.serve.structured.tools import ToolUse
from jaxrl.tool_calls.chat_message import as_message
from jaxrl.tool_calls.formats import FORMATS
from jaxrl.tool_calls.parser import ToolParser, parse_turn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


def echo(text, name="echo"):
    return json.dumps({"name": name, "arguments": {"text": text}})


def read(text, name="hermes", **options):
    """(content, the arguments of the calls that could be read, number of malformed calls)."""
    turn = parse_turn(text, FORMATS[name], **options)
    return turn.content, [call.arguments for call in turn.calls], len(turn.malformed)


IN_STRINGS = {  # (format, turn, value of the argument "text" of its call)
    "E1": ("hermes", OPEN + echo("a </tool_call> b") + CLOSE, "a </tool_call> b"),
    "opening marker": ("hermes", OPEN + echo(OPEN + "{}" + CLOSE) + CLOSE, OPEN + "{}" + CLOSE),
    "after an escaped quote": (
        "hermes",
        OPEN + echo('\\" </tool_call>') + CLOSE,
        '\\" </tool_call>',
    ),
    "without closing marker": ("hermes", OPEN + echo("a </tool_call> b"), "a </tool_call> b"),
    "arguments as text": (
        "hermes",
        OPEN + json.dumps({"name": "f", "arguments": json.dumps({"text": CLOSE})}) + CLOSE,
        CLOSE,
    ),
    "in a list": ("hermes", f"{OPEN}[{echo(CLOSE)}]{CLOSE}", CLOSE),
    "mistral": ("mistral", f"[TOOL_CALLS][{echo('[TOOL_CALLS]')}]", "[TOOL_CALLS]"),
    "mistral 11": (
        "mistral",
        f"[TOOL_CALLS]echo[ARGS]{json.dumps({'text': '[TOOL_CALLS]x'})}",
        "[TOOL_CALLS]x",
    ),
    "llama3": ("llama3", "<|python_tag|>" + echo("<|python_tag|>"), "<|python_tag|>"),
    "llama3 without marker": ("llama3", echo("; <|python_tag|>"), "; <|python_tag|>"),
    "deepseek": (
        "deepseek",
        f"{BEGIN}function{SEP}echo\n{FENCE}json\n{json.dumps({'text': END})}\n{FENCE}{END}",
        END,
    ),
    "deepseek 3.1": ("deepseek", f"{BEGIN}echo{SEP}{json.dumps({'text': END})}{END}", END),
}


@pytest.mark.parametrize("case", IN_STRINGS)
def test_a_marker_within_a_string_of_the_arguments_is_text(case):
    name, text, value = IN_STRINGS[case]
    assert read(text, name) == ("", [{"text": value}], 0)


GOOD = OPEN + echo("x") + CLOSE
BROKEN = {  # text whose call cannot be read, before a call that can
    "string without end": f'{OPEN}{{"name": "f", "arguments": {{"a": "x}}}}{CLOSE}\n',
    "string without end, same line": f'{OPEN}{{"a": "x}}{CLOSE} ',
    "single quotes": f"{OPEN}{{'name': 'f'}}{CLOSE}\n",
    "bad escape": f'{OPEN}{{"name": "\\x"}}{CLOSE}\n',
    "brace without end": f'{OPEN}{{"name": "f"{CLOSE}\n',
    "no JSON": f"{OPEN}f(){CLOSE}\n",
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_call_that_cannot_be_read_does_not_take_the_next_one_with_it(case):
    content, arguments, n_malformed = read(BROKEN[case] + GOOD)
    assert (content, arguments, n_malformed) == (BROKEN[case].rstrip(), [{"text": "x"}], 1)


UNCHANGED = {  # turns without a call that could be read: the content is all of their text
    "E2": ("hermes", "First <tool_call>{bad}</tool_call> then the rest."),
    "blanks around": ("hermes", " \n<tool_call>{bad}</tool_call> \n"),
    "no closing marker": ("hermes", 'First <tool_call>{"name": "f", "argu'),
    "opening marker only": ("hermes", "First <tool_call>"),
    "several": ("hermes", "<tool_call>1</tool_call>\n\n<tool_call>\n2\n</tool_call>"),
    "mistral": ("mistral", "First [TOOL_CALLS]{bad} then the rest."),
    "llama3": ("llama3", "First <|python_tag|>print(5)\n"),
    "llama3 without marker": ("llama3", ' {"name": "f", "parameters": {"a": }} '),
    "deepseek": (
        "deepseek",
        f"First <｜tool▁calls▁begin｜>{BEGIN}f{END}\n<｜tool▁calls▁end｜> then the rest. ",
    ),
    "deepseek without a call": (
        "deepseek",
        "First <｜tool▁calls▁begin｜> then <｜tool▁calls▁end｜>",
    ),
}


def streamed(text, name, size):
    """(content, calls as OpenAI's API returns them, number of malformed calls) of a stream."""
    use = ToolUse((), "auto", parallel=True, format=FORMATS[name])
    output = ToolOutput(use)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    deltas = [output.add(piece, ended=False) for piece in pieces] + [output.add("", ended=True)]
    functions = [call["function"] for delta in deltas for call in delta.calls]
    content = "".join(delta.content for delta in deltas)
    return content, functions, sum(delta.n_malformed for delta in deltas)


@pytest.mark.parametrize("case", UNCHANGED)
def test_the_text_of_a_malformed_call_stays_where_it_is(case):
    name, text = UNCHANGED[case]
    content, calls, _ = read(text, name)
    assert (content, calls) == (text, [])
    for size in (1, 5, len(text)):
        content, functions, n_malformed = streamed(text, name, size)
        assert (content, functions) == (text, [])
        assert (n_malformed > 0) == (case != "deepseek without a call")


def test_a_malformed_call_stays_between_text_and_calls():
    text = f"One.\n{GOOD}\nTwo. <tool_call>{{bad}}</tool_call> Three.\n{GOOD}\n"
    expected = "One.\nTwo. <tool_call>{bad}</tool_call> Three."
    assert read(text) == (expected, [{"text": "x"}] * 2, 1)
    assert streamed(text, "hermes", 3)[0] == expected


@pytest.mark.parametrize("empty", ["", " \n", None, "null", "{}", {}], ids=repr)
def test_no_arguments_are_an_empty_object(empty):  # E3
    call = json.dumps({"name": "now", "arguments": empty})
    assert read(f"{OPEN}{call}{CLOSE}") == ("", [{}], 0)
    assert read(f"[TOOL_CALLS][{call}]", "mistral") == ("", [{}], 0)
    history = {"type": "function", "function": {"name": "now", "arguments": empty}}
    message = as_message({"role": "assistant", "content": None, "tool_calls": [history]})
    assert message is not None and message["tool_calls"] == [
        {"type": "function", "function": {"name": "now", "arguments": {}}}
    ]


def test_absent_arguments_are_an_empty_object():
    message = as_message({"role": "assistant", "tool_calls": [{"function": {"name": "now"}}]})
    assert message is not None and message["tool_calls"][0]["function"]["arguments"] == {}
    assert read("[TOOL_CALLS]now[ARGS]", "mistral") == ("", [{}], 0)
    block = f"{BEGIN}function{SEP}now\n{FENCE}json\n{FENCE}{END}"
    assert read(block, "deepseek") == ("", [{}], 0)


@pytest.mark.parametrize("arguments", ["[]", "5", "{", '"x"', "no JSON", [], 5, False, ""])
def test_other_arguments_of_a_message_are_refused_with_the_call(arguments):
    call = {"function": {"name": "now", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    if arguments == "":
        assert as_message(message)
        return
    with pytest.raises(ValueError, match=r"the tool call .*'now'.*; correct the row"):
        as_message(message)


REASONING = {  # (turn, number of calls)
    "E4": (f"The tag <think> opens the reasoning.\n{GOOD}", 1),
    "both tags": (f"Between <think> and </think>.\n{GOOD}", 1),
    "after the reasoning": (f"<think>a</think>I write <think> now.\n{GOOD}", 1),
    "after a call": (f"{GOOD}<think>{GOOD}", 2),
    "a block at the start": (f"\n<think>Perhaps {GOOD}</think>\n{GOOD}", 1),
    "an open block": (f"<think>Perhaps {GOOD}", 0),
    "half a tag": (f"<thin{GOOD}", 1),
}


@pytest.mark.parametrize("case", REASONING)
def test_only_a_block_at_the_start_of_a_turn_is_reasoning(case):
    text, n_calls = REASONING[case]
    content, calls, n_malformed = read(text)
    assert (len(calls), n_malformed) == (n_calls, 0)
    assert content.startswith(text[: text.find(OPEN)].rstrip())


def test_reasoning_that_the_prompt_opens_ends_once():
    text = f"Perhaps {GOOD} or <think></think>Then <think>: {GOOD}"
    content, calls, _ = read(text, in_thought=True)
    assert (content, len(calls)) == (text[: -len(GOOD)].rstrip(), 1)


@pytest.mark.parametrize("number", ["1e400", "-1e999", "NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek", "llama3"])
def test_a_number_that_json_does_not_have_is_a_malformed_call(name, number):  # E5
    arguments = f'{{"a": [{number}]}}'
    text = {
        "hermes": f'{OPEN}{{"name": "f", "arguments": {arguments}}}{CLOSE}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{arguments}",
        "deepseek": f"{BEGIN}f{SEP}{arguments}{END}",
        "llama3": f'{{"name": "f", "parameters": {arguments}}}',
    }[name]
    (attempt,) = parse_turn(text, FORMATS[name]).malformed
    assert number in attempt.reason
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ValueError, match=f"{number}.*correct the row"):
        as_message({"role": "assistant", "content": "", "tool_calls": [call]})


def test_a_number_of_a_row_that_json_does_not_have_is_refused():
    call = {"function": {"name": "f", "arguments": {"a": [float("inf")]}}}
    with pytest.raises(ValueError, match="inf is no number of JSON; correct the row"):
        as_message({"role": "assistant", "content": "", "tool_calls": [call]})


PIECES = [
    *(
        OPEN,
        CLOSE,
        "<think>",
        "</think>",
        GOOD,
        echo(CLOSE),
        '{"name": "f"',
        "1e400",
        "text",
        "\x00",
    ),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "f",
        "<|python_tag|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *(BEGIN, SEP, END, FENCE, *'"\\{}[]:;,< \n'),
]


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    in_thought=st.booleans(),
)
def test_a_stream_in_any_pieces_gives_what_the_whole_turn_gives(name, text, cuts, in_thought):
    whole = parse_turn(text, FORMATS[name], in_thought=in_thought)
    ends = [*sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for bounds in (ends, range(1, len(text) + 1)):
        parser = ToolParser(FORMATS[name], in_thought=in_thought)
        starts = [0, *bounds][: len(bounds)]
        pieces = [text[a:b] for a, b in zip(starts, bounds, strict=True)]
        turns = [parser.add(piece) for piece in pieces] + [parser.finish()]
        assert "".join(turn.content for turn in turns) == whole.content
        assert sum((turn.attempts for turn in turns), ()) == whole.attempts
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize(
    "text",
    [OPEN + '{"a": "' + CLOSE * 30_000, OPEN + '{"a": "' + f'\\"{CLOSE}' * 30_000, "<" * 400_000],
    ids=["open string", "escaped quotes", "no marker"],
)
def test_reading_a_turn_is_linear_in_its_text(text):
    start = time.process_time()
    assert parse_turn(text, FORMATS["hermes"]).content == text
    assert time.process_time() - start < 5.0  # reading up to each marker again takes minutes
