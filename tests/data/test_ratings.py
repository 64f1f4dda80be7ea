"""Tests of jaxrl/data/ratings.py: answers with ratings, and the rows that are refused."""

import json
from typing import Any

import numpy as np
import pytest

from jaxrl.config.keys import DataConfig
from jaxrl.data.items import load_items
from jaxrl.data.ratings import rating_maker

ROW = {"prompt": "1 + 2?", "response": "3", "helpfulness": 4, "verbosity": None}


def load(tmp_path, renderer, *rows, **data: Any):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    attributes = ("helpfulness", "verbosity")
    maker = rating_maker(renderer, DataConfig(**data), stop=(2,), attributes=attributes)
    return load_items([str(path)], maker)


def test_an_answer_has_the_ratings_that_its_row_has(renderer, tmp_path):
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", "?"), ("assistant", "a"), ("user", "!"), ("assistant", "b"))
    ]
    items = load(tmp_path, renderer, ROW, {"messages": turns, "verbosity": 0.5})
    np.testing.assert_array_equal([i.ratings for i in items], [[4, np.nan], [np.nan, 0.5]])
    shown = [renderer.decode(i.completion.tokens, skip_special=False) for i in items]
    assert shown == ["3<|im_end|>", "b<|im_end|>"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"helpfulness": "high"}, "helpfulness is 'high'; give a number, or null"),
        ({"helpfulness": float("nan")}, "helpfulness is nan; give a number, or null"),
        ({"helpfulness": None}, r"none of reward_model\.attributes=\('helpfulness', 'verbosity'\)"),
        ({"response": None}, "required are messages, or a prompt"),
    ],
)
def test_rows_without_an_answer_or_with_other_ratings_are_refused(
    renderer, tmp_path, changes, message
):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1.*{message}"):
        load(tmp_path, renderer, ROW | changes)


def test_long_answers_are_dropped_if_the_config_says_so(renderer, tmp_path):
    long = ROW | {"response": "x" * 500}
    limits: dict[str, Any] = {"max_prompt_len": 64, "max_response_len": 64}
    assert len(load(tmp_path, renderer, ROW, long, **limits, filter_overlong_prompts=True)) == 1
    with pytest.raises(ValueError, match=r"tokens in prompt and answer, .* = 128; raise them"):
        load(tmp_path, renderer, ROW, long, **limits, filter_overlong_prompts=False)
