"""Tests of jaxrl/data/steps.py: where the steps of an answer end, and which rows are refused."""

import json
from typing import Any

import numpy as np
import pytest

from jaxrl.config.keys import DataConfig
from jaxrl.data.items import load_items
from jaxrl.data.steps import StepFinder, step_ends, step_maker

ROW = {"prompt": "1 + 2 + 3?", "completions": ["1 + 2 is 3", "So 7."], "labels": [True, False]}


def load(tmp_path, renderer, *rows, separator="\n", **data: Any):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    maker = step_maker(renderer, DataConfig(**data), stop=(2,), separator=separator)
    return load_items([str(path)], maker)


@pytest.mark.parametrize(
    "tokens, separator, ends",
    [
        ("a|\n|b|<end>", "\n", [1, 3]),
        ("a|\n|b|\n|", "\n", [1, 3]),  # nothing follows the last separator
        ("a|\n\n|\n|b", "\n", [1, 3]),  # no empty steps
        ("\n|a|.\n  |b", "\n", [2, 3]),  # the separator is a part of a token
        ("a|\n|\n|b\n|c", "\n\n", [2, 4]),  # and of several
        ("a", "\n", [0]),
        ("|", "\n", [1]),  # an empty answer is one step
        ("a\nb\n|c", "\n", [0, 1]),  # two ends in one token are one
        ("St|ep к|и", "ки", [2]),
    ],
)
def test_a_step_ends_with_the_token_that_completes_its_separator(tokens, separator, ends):
    assert step_ends([t.encode() for t in tokens.split("|")], separator.encode()) == ends


def test_labels_are_at_the_separators_and_at_the_end_of_the_turn(renderer, tmp_path):
    [item] = load(tmp_path, renderer, ROW | {"labels": [1, 0.25]})
    d = item.completion
    tokens = np.concatenate([d.prompt_tokens, d.tokens])
    shown = renderer.decode(tokens, skip_special=False)
    assert shown.endswith("assistant\n1 + 2 is 3\nSo 7.<|im_end|>")
    marked = d.tokens[d.loss_mask]
    ends = [renderer.decode([t], skip_special=False) for t in marked.tolist()]
    assert ends == ["\n", "<|im_end|>"]
    assert renderer.decode(d.prompt_tokens, skip_special=False).endswith("1 + 2 is 3")
    np.testing.assert_array_equal(item.labels, np.array([1, 0.25], np.float32))


def test_a_separator_of_several_tokens_and_characters_is_found(renderer, tmp_path):
    steps = {"completions": ["é 1", "é 2", "é 3"], "labels": [1, 1, 0]}
    for separator in ("\n\n", " ки\n", "é|"):
        [item] = load(tmp_path, renderer, ROW | steps, separator=separator)
        d = item.completion
        end = int(np.flatnonzero(d.loss_mask)[1]) + len(d.prompt_tokens)
        tokens = np.concatenate([d.prompt_tokens, d.tokens])[: end + 1]
        assert renderer.decode(tokens, skip_special=False).endswith(f"é 2{separator}")


def test_special_tokens_have_no_text(renderer):
    tokens = renderer.tokenize(["a\nb"])[0]
    finder = StepFinder(renderer, "\n")
    ends = finder.ends(tokens)
    assert finder.ends(np.append(tokens, 2)) == [ends[0], len(tokens)]
    assert StepFinder(renderer, "im_end").ends(np.append(tokens, 2)) == [len(tokens)]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"labels": [True]}, "2 completions and 1 labels; give each step one label"),
        ({"completions": [], "labels": []}, "0 completions and 0 labels"),
        ({"labels": [True, 2]}, "label of step 2 is 2; give true or false, or a number from 0"),
        ({"labels": [True, "+"]}, "label of step 2 is '[+]'"),
        ({"labels": [True, None]}, "label of step 2 is None"),
        ({"completions": ["a", " "]}, "step 2 is ' ', not a text"),
        ({"completions": ["a", ["b"]]}, r"step 2 is \['b'\], not a text"),
        ({"completions": ["a\nb", "c"]}, r"has 2 steps, but joined by .*'\\n' they are 3"),
        ({"completions": "a\nb"}, "needs a prompt .* the list of steps completions"),
        ({"prompt": None}, "needs a prompt"),
        ({"prompt": [{"role": "assistant", "content": "?"}]}, "ends with an assistant turn"),
    ],
)
def test_rows_whose_steps_are_not_clear_are_refused(renderer, tmp_path, changes, message):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1.*{message}"):
        load(tmp_path, renderer, ROW | changes)


def test_long_answers_are_dropped_if_the_config_says_so(renderer, tmp_path):
    long = ROW | {"completions": ["x" * 500, "b"]}
    limits: dict[str, Any] = {"max_prompt_len": 64, "max_response_len": 64}
    assert len(load(tmp_path, renderer, ROW, long, **limits, filter_overlong_prompts=True)) == 1
    with pytest.raises(ValueError, match=r"tokens in prompt and steps, .* = 128; raise them"):
        load(tmp_path, renderer, ROW, long, **limits, filter_overlong_prompts=False)
