"""Tests of jaxrl/tool_calls/reasoning.py: reasoning and answer of a turn, in any pieces."""

import pytest

from jaxrl.tool_calls.reasoning import ReasoningSplitter, split_reasoning


@pytest.mark.parametrize(
    ("text", "in_thought", "parts"),
    [
        ("\n<think>\nwhy? <b>\n</think>\n\nso ", False, ("why? <b>", "so ")),
        ("why</think>so", True, ("why", "so")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("<think></think>so", False, ("", "so")),
        (" so <think>no</think>", False, ("", " so <think>no</think>")),
        ("<thi", False, ("", "<thi")),
        ("", True, ("", "")),
    ],
)
def test_any_pieces_join_to_the_parts(text, in_thought, parts):
    assert split_reasoning(text, in_thought=in_thought) == parts
    for size in (1, 3, 7):
        splitter = ReasoningSplitter(in_thought=in_thought)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        found = [splitter.add(piece) for piece in pieces] + [splitter.add("", ended=True)]
        assert tuple(map("".join, zip(*found, strict=True))) == parts
