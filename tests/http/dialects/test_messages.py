"""Tests of jaxrl/http/dialects/messages.py and messages_events.py: bodies and events."""

import json

import pytest

from jaxrl.http.dialects.messages import chat_of_count, chat_of_messages
from jaxrl.http.dialects.messages_events import UNSIGNED, MessagesWriter
from jaxrl.http.dialects.turn import EndOfTurn, TurnPiece
from jaxrl.http.errors import RequestError

HI = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "max_tokens": 5, "messages": HI}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PIECE = TurnPiece("why", "so", calls=(CALL,))


def test_blocks_become_messages_of_a_chat_completion():
    cache = {"cache_control": {"type": "ephemeral"}}
    blocks = [
        {"type": "thinking", "thinking": "why", "signature": "x"},
        {"type": "text", "text": "so", **cache},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}, "caller": None},
    ]
    image = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
        {"type": "text", "text": "more", **cache},
        {"type": "image", "source": image},
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": " kind."}]
    chat = chat_of_messages(
        BODY
        | {
            "system": system,
            "messages": [
                *HI,
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": results},
            ],
            "stop_sequences": ["x"],
            "temperature": 0.5,
            "metadata": {"user_id": "u"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "f", "input_schema": {"type": "object"}, **cache}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
    )
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    url = {"url": "data:image/png;base64,AA=="}
    parts = [{"type": "text", "text": "more"}, {"type": "image_url", "image_url": url}]
    assert chat == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.5,
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": "so",
                "reasoning_content": "why",
                "tool_calls": [called],
            },
            {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "c1"},
            {"role": "tool", "content": "", "tool_call_id": "c2"},
            {"role": "user", "content": parts},
        ],
        "stop": ["x"],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    named = BODY | {
        "output_config": {"format": schema},
        "tool_choice": {"type": "tool", "name": "f"},
    }
    assert chat_of_messages(named)["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "reply", **schema},
    }
    assert chat_of_messages(named)["tool_choice"]["function"] == {"name": "f"}
    assert chat_of_count({"messages": HI}) == {"messages": chat_of_messages(BODY)["messages"]}


REFUSED = {
    "max_token": {"max_token": 5},
    "container": {"container": "c"},
    "context_management": {"context_management": {"edits": [{"type": "compact"}]}},
    "max_tokens": {"max_tokens": None},
    "thinking": {"thinking": {"type": "often"}},
    "messages": {"messages": []},
    "messages[0]": {"messages": [{"role": "tool", "content": "x"}]},
    "reply cannot be prefilled": {"messages": [*HI, {"role": "assistant", "content": "x"}]},
    "document": {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
    "'citations'": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": [1]}]}]
    },
    "neither base64 nor a url": {
        "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]
    },
    "web_search": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "'strict'": {"tools": [{"name": "f", "input_schema": {}, "strict": True}]},
    "tool_choice": {"tool_choice": "auto"},
    "output_config.effort": {"output_config": {"effort": "high"}},
    "system": {"system": 5},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_has_no_equivalent_is_refused_by_name(named):
    with pytest.raises(RequestError) as refused:
        chat_of_messages(BODY | REFUSED[named])
    assert refused.value.status == 400 and named in refused.value.message


def test_a_message_has_blocks_and_the_reason_of_its_end():
    message = MessagesWriter("m").full(PIECE, EndOfTurn("stop", 7, 3))
    assert message["content"] == [
        {"type": "thinking", "thinking": "why", "signature": UNSIGNED},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (7, 3)
    for end, reason in (
        (EndOfTurn("length", 7, 3), "max_tokens"),
        (EndOfTurn("stop", 7, 3), "end_turn"),
        (EndOfTurn("stop", 7, 3, "!"), "stop_sequence"),
    ):
        assert MessagesWriter("m").full(TurnPiece(), end)["stop_reason"] == reason


def test_the_events_of_a_message_are_blocks_one_after_another():
    writer = MessagesWriter("m")
    events = [*writer.start(7)]
    for piece in (TurnPiece("w"), TurnPiece("hy", "s"), TurnPiece("", "o", calls=(CALL, CALL))):
        events += writer.add(piece)
    events += writer.end(EndOfTurn("stop", 7, 3))
    lines = [event.splitlines() for event in events]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data, _ in lines]
    assert [body["type"] for body in bodies] == [
        kind.removeprefix("event: ") for kind, _, _ in lines
    ]
    start, ping, *blocks, delta, stop = bodies
    assert (start["type"], ping["type"], stop["type"]) == ("message_start", "ping", "message_stop")
    assert delta["delta"]["stop_reason"] == "tool_use" and delta["usage"]["output_tokens"] == 3
    shown = [
        (b["index"], b.get("content_block", b.get("delta", {"type": "stop"}))["type"])
        for b in blocks
    ]
    call = [("tool_use",), ("input_json_delta",), ("stop",)]
    assert shown == [
        (0, "thinking"), (0, "thinking_delta"), (0, "thinking_delta"), (0, "signature_delta"),
        (0, "stop"), (1, "text"), (1, "text_delta"), (1, "text_delta"), (1, "stop"),
        *((2, *kind) for kind in call), *((3, *kind) for kind in call),
    ]  # fmt: skip
