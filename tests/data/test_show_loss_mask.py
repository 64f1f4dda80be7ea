"""Tests of scripts/show_loss_mask.py."""

import json

import pytest

from scripts.show_loss_mask import main
from tests.data.families import write_tokenizer

ROW = {
    "messages": [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n3"},
        {"role": "user", "content": "And 3 + 4?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n7"},
    ]
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    return write_tokenizer(tmp_path, "qwen3")


def test_learned_text_is_in_brackets(model, capsys):
    assert main([str(model), str(model / "rows.jsonl")]) == 0
    first, second = capsys.readouterr().out.split("--- row 0, sequence ")[1:]
    assert first.splitlines()[1:] == [
        "<|im_start|>user",
        "1 + 2?<|im_end|>",
        "<|im_start|>assistant",
        "⟦<think>",
        "add",
        "</think>",
        "",
        "3<|im_end|>⟧",
    ]
    assert second.count("⟦") == 1 and "assistant\n3<|im_end|>" in second
    assert second.endswith("⟦<think>\nadd\n</think>\n\n7<|im_end|>⟧\n")


def test_a_turn_that_cannot_be_masked_is_named_with_its_row(model, capsys):
    data = str(model / "rows.jsonl")
    assert main([str(model), data, "enable_thinking=false"]) == 1
    error = capsys.readouterr().err
    assert f"error: {data}:1: turn 1 (" in error and "as a continuation" in error
    assert main([str(model), data, "enable_thinkng=false"]) == 1
    assert "did you mean enable_thinking" in capsys.readouterr().err
