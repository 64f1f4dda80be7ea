"""Tests of a teacher's most likely tokens in a column of SFT rows."""

import numpy as np
import pytest

from jaxrl.data.teacher_columns import read_teacher_tokens

TOKENS = np.array([9, 5, 6, 2], np.int32)
MASK = np.array([False, True, False, True])
ROW = [
    {"token": 5, "ids": [1, 5, 7], "logprobs": [-3.0, -0.5, -2.0]},
    {"token": 2, "ids": [2, 3, 4], "logprobs": [-0.1, -4.0, -5.0]},
]


def read(entries, k=2):
    row = {"top": entries}
    return read_teacher_tokens(row, "top", TOKENS, MASK, k=k, n_vocab=10, place="f.jsonl:1")


def test_the_most_likely_ids_are_at_the_learned_tokens():
    found = read(ROW)
    np.testing.assert_array_equal(found.ids, [[0, 0], [5, 7], [0, 0], [2, 3]])
    np.testing.assert_allclose(found.logp, [[0, 0], [-0.5, -2.0], [0, 0], [-0.1, -4.0]])
    np.testing.assert_array_equal(found[1:2].ids, [[5, 7]])
    assert read(None) is None


REFUSED = {
    "too few entries": (ROW[:1], r"has 1 entries for 2 learned tokens"),
    "no list": (5, r"has int entries for 2"),
    "another token": ([ROW[0] | {"token": 6}, ROW[1]], r"entry 0 .* token 6.*token is 5"),
    "too few ids": ([ROW[0] | {"ids": [5], "logprobs": [-1.0]}, ROW[1]], r"has 1 different ids"),
    "an id twice": ([ROW[0] | {"ids": [5, 5, 7]}, ROW[1]], r"has 2 different ids"),
    "other lengths": ([ROW[0] | {"logprobs": [-1.0]}, ROW[1]], r"as many logprobs as ids"),
    "an id beyond": ([ROW[0] | {"ids": [5, 7, 10]}, ROW[1]], r"has the id 10, .* has 10"),
    "a positive one": ([ROW[0] | {"logprobs": [0.5, -1.0, -1.0]}, ROW[1]], r"a distribution"),
    "too much": ([ROW[0] | {"logprobs": [-0.1, -0.1, -0.1]}, ROW[1]], r"a distribution"),
    "not finite": ([ROW[0] | {"logprobs": [float("nan")] * 3}, ROW[1]], r"a distribution"),
    "text": ([ROW[0] | {"ids": "578"}, ROW[1]], r"is not \{'token'"),
    "no object": ([[5, 1], ROW[1]], r"is not \{'token'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_entry_that_does_not_fit_is_refused_with_its_place(name):
    entries, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"f\.jsonl:1: .*{message}"):
        read(entries)


def test_a_row_without_the_column_is_refused():
    with pytest.raises(ValueError, match=r"no column 'top'.*write null"):
        read_teacher_tokens({}, "top", TOKENS, MASK, k=2, n_vocab=10, place="f.jsonl:1")
