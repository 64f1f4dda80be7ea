"""Tests of jaxrl/data/preferences.py: which answers a row compares."""

import json

import numpy as np
import pytest

from jaxrl.config.keys import DataConfig
from jaxrl.data.items import load_items
from jaxrl.data.preferences import conversations, pair_maker

STOP = (2,)
QUESTION = {"role": "user", "content": "1 + 2?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is 3.", "4"))


def load(tmp_path, renderer, *rows, takes_labels=False, **data):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    maker = pair_maker(renderer, DataConfig(**data), stop=STOP, takes_labels=takes_labels)
    return load_items([str(path)], maker)


FORMS = [
    {"prompt": "1 + 2?", "chosen": "It is 3.", "rejected": "4"},
    {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    {
        "prompt": "1 + 2?",
        "chosen": [QUESTION, GOOD],
        "rejected": [QUESTION, BAD],
    },  # as UltraFeedback has it
]


@pytest.mark.parametrize("row", FORMS)
def test_all_forms_give_the_same_pair(row, renderer, tmp_path):
    [pair] = load(tmp_path, renderer, row)
    for one, answer in ((pair.chosen, GOOD), (pair.rejected, BAD)):
        np.testing.assert_array_equal(one.prompt_tokens, renderer.render([QUESTION]))
        shown = renderer.decode(one.tokens, skip_special=False)
        assert shown == answer["content"] + "<|im_end|>" and one.loss_mask.all()


def test_one_answer_with_a_label_is_for_kto_alone(renderer, tmp_path, caplog):
    rows = [
        {"prompt": "1 + 2?", "completion": "It is 3.", "label": True},
        {"prompt": [QUESTION], "completion": [BAD], "label": False},  # as TRL has them
    ]
    good, bad = load(tmp_path, renderer, *rows, takes_labels=True)
    [pair] = load(tmp_path, renderer, FORMS[0])
    assert (good.desirable, bad.desirable) == (True, False)
    for one, same in ((good, pair.chosen), (bad, pair.rejected)):
        np.testing.assert_array_equal(one.completion.tokens, same.tokens)
        np.testing.assert_array_equal(one.completion.prompt_tokens, same.prompt_tokens)
    assert "each answer is learned by its label" in caplog.text
    with pytest.raises(ValueError, match=r"jsonl:1 has one answer with a label.*loss='kto'"):
        load(tmp_path, renderer, *rows)
    with pytest.raises(ValueError, match=r"label='yes' is neither true .* nor false"):
        load(tmp_path, renderer, rows[0] | {"label": "yes"}, takes_labels=True)


def test_a_row_may_have_a_margin(renderer, tmp_path):
    row = FORMS[0]
    with_margin, without = load(tmp_path, renderer, row | {"margin": 2}, row)
    assert (with_margin.margin, without.margin) == (2.0, 0.0)
    with pytest.raises(ValueError, match="margin='much' is not a finite number"):
        load(tmp_path, renderer, row | {"margin": "much"})


def test_only_the_last_turn_is_in_the_loss(renderer, tmp_path):
    earlier = [QUESTION, GOOD, {"role": "user", "content": "Sure?"}]
    [pair] = load(tmp_path, renderer, {"prompt": earlier, "chosen": "Yes.", "rejected": "No."})
    np.testing.assert_array_equal(pair.chosen.prompt_tokens, renderer.render(earlier))
    assert renderer.decode(pair.rejected.tokens) == "No."


@pytest.mark.parametrize(
    "row, complaint",
    [
        (
            {"prompt": "1?", "chosen": "2"},
            "has the columns prompt, chosen; required are chosen and",
        ),
        ({"prompt": "1?", "chosen": "2", "rejected": "2"}, "are equal"),
        ({"chosen": "2", "rejected": "3"}, "chosen is not an answer to a prompt"),
        (
            {"prompt": "1?", "chosen": [QUESTION], "rejected": "3"},
            "chosen is not an answer to a prompt",
        ),
    ],
)
def test_a_row_without_a_pair_is_an_error_with_its_place(row, complaint):
    with pytest.raises(ValueError, match=f"f:3.*{complaint}"):
        conversations(row, "f:3")


def test_overlong_pairs_are_dropped_or_rejected(renderer, tmp_path):
    rows = [{"prompt": "1?", "chosen": "2" * n, "rejected": "3"} for n in (5, 90)]
    size = dict(max_prompt_len=40, max_response_len=20)
    assert [pair.id for pair in load(tmp_path, renderer, *rows, **size)] == [0]
    with pytest.raises(ValueError, match=r"all 1 pairs of .* = 60 tokens"):
        load(tmp_path, renderer, rows[1], **size)
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 has 1\d\d tokens in prompt and answer"):
        load(tmp_path, renderer, *rows, **size, filter_overlong_prompts=False)


def test_columns_are_read_under_the_names_of_the_mapping(renderer, tmp_path):
    row = {"q": "1 + 2?", "good": "It is 3.", "bad": "4"}
    columns = ("prompt:q", "chosen:good", "rejected:bad")
    [pair] = load(tmp_path, renderer, row, columns=columns)
    assert [renderer.decode(one.tokens) for one in (pair.chosen, pair.rejected)] == [
        "It is 3.",
        "4",
    ]
