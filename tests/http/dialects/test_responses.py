"""Tests of jaxrl/http/dialects/responses.py and responses_events.py; tests/serve has the others."""

import json

import pytest

from jaxrl.http.dialects.responses import LOGPROBS, chat_of_responses
from jaxrl.http.dialects.responses_events import ResponsesWriter
from jaxrl.http.dialects.turn import EndOfTurn, TurnPiece
from jaxrl.http.errors import RequestError

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_items_become_messages_of_a_chat_completion():
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
    parts = [{"type": "input_text", "text": "hi"}, image]
    chat = chat_of_responses(
        {
            "instructions": "Be kind.",
            "input": [
                {"role": "user", "content": parts},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
            ],
            "max_output_tokens": 5,
            "include": [LOGPROBS, "reasoning.encrypted_content"],
        }
    )
    url = {"url": "data:image/png;base64,AA=="}
    assert chat == {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "hi"},
                    {"type": "image_url", "image_url": url},
                ],
            },
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ],
        "max_completion_tokens": 5,
        "logprobs": True,
    }
    with pytest.raises(RequestError, match="file_id"):
        chat_of_responses({"input": [{"role": "user", "content": [image | {"file_id": "f"}]}]})


def test_the_events_of_a_response_number_items_and_end_with_it():
    writer, end = ResponsesWriter("m", {}), EndOfTurn("stop", 7, 3)
    events = [*writer.start(7), *writer.add(TurnPiece("", "so", (), (CALL,))), *writer.end(end)]
    bodies = [json.loads(event.splitlines()[1].removeprefix("data: ")) for event in events]
    assert [body["sequence_number"] for body in bodies] == list(range(len(events)))
    assert bodies[-1]["type"] == "response.completed"
    message, call = bodies[-1]["response"]["output"]
    assert (message["content"][0]["text"], call["name"]) == ("so", "f")
    assert bodies[-1]["response"]["usage"]["total_tokens"] == 10
    places = {b["item"]["id"]: b["output_index"] for b in bodies if "item" in b}
    assert places == {message["id"]: 0, call["id"]: 1}
    full = ResponsesWriter("m", {}).full(TurnPiece("", "so", (), (CALL,)), end)
    assert [item["type"] for item in full["output"]] == ["message", "function_call"]
