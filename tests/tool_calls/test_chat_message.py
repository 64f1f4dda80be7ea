"""Tests of jaxrl/tool_calls/chat_message.py."""

import pytest

from jaxrl.tool_calls.chat_message import as_message

CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}


def test_arguments_become_an_object_and_a_turn_may_have_calls_only():
    message = as_message({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert message is not None and message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize("calls", [3, "add", CALL, [3], [{"name": 1, "arguments": {}}]])
def test_calls_of_another_form_are_refused_with_the_value(calls):
    with pytest.raises(ValueError, match=r"tool.call.*; correct the row"):
        as_message({"role": "assistant", "content": "", "tool_calls": calls})
