"""Tests of jaxrl/data/content.py."""

import dataclasses

import numpy as np
import pytest

from jaxrl.data.content import check_content, content
from jaxrl.data.demonstrations import demonstration
from jaxrl.data.preferences import Pair
from jaxrl.types import Prompt

PROMPT = Prompt(
    id=0,
    messages=({"role": "user", "content": "1 + 2?"},),
    tokens=np.array([5, 6], np.int32),
    answer="3",
)


def complaint(before, after) -> str:
    with pytest.raises(ValueError, match="differ from those of the checkpoint") as error:
        check_content({"data.train": content(before)}, {"data.train": content(after)})
    return str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"answer": "4"},
        {"answer": {"target": 3}},
        {"extra": {"index": 1}},
        {"source": "gsm8k"},
        {"messages": ({"role": "user", "content": "1 + 3?"},)},
    ],
    ids=str,
)
def test_changed_rows_of_equal_number_are_an_error(change):
    changed = dataclasses.replace(PROMPT, **change)
    assert "data.train: the rows have changed" in complaint([PROMPT, PROMPT], [PROMPT, changed])
    assert "have changed" in complaint([PROMPT, changed], [changed, PROMPT])  # another order


def test_the_same_rows_with_other_tokens_name_the_chat_template_and_the_date():
    changed = dataclasses.replace(PROMPT, tokens=np.array([5, 7], np.int32))
    message = complaint([PROMPT], [changed])
    assert "data.train: the rows are the same, but not their tokens" in message
    assert "data.today" in message and "another run_dir" in message


def test_changed_demonstrations_and_pairs_are_an_error():
    tokens, mask = np.array([1, 2, 3], np.int32), np.array([False, False, True])
    one = demonstration(0, tokens, mask)
    other = demonstration(0, tokens, np.array([False, True, True]))
    assert "the tokens have changed" in complaint([one], [other])
    pair = Pair(0, one, other)
    assert "the tokens have changed" in complaint([pair], [dataclasses.replace(pair, margin=1.0)])


def test_equal_data_and_checkpoints_without_hashes_are_accepted():
    now = {"data.train": content([PROMPT]), "data.val": content([])}
    check_content(now, {name: dict(found) for name, found in now.items()})
    check_content({}, now)
