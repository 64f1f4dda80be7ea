"""Tests of jaxrl/report/trajectories.py and web/trajectories.js: data of the trajectory viewer."""

import copy
import json
import math

import pytest

from jaxrl.report import trajectories as module
from jaxrl.report.page import page_data
from jaxrl.report.record import read_record
from jaxrl.report.trajectories import read_row, read_sequence, trajectory_rows
from tests.report.test_report import HOSTILE, data_of, page_of, sample, write_run

SEQUENCE = {
    "prompt": [["system", "Be brief."], ["user", HOSTILE]],
    "n_prompt_messages": 2,
    "n_prompt_tokens": 30,
    "n_tokens": 4,
    "kept": [[0, 4]],
    "tokens": ["a", HOSTILE, "c", "d"],
    "logp": [-0.5, -0.25, 0, -2],
    "difference": [0.125, -0.75, 9, 0],
    "advantage": [1, 1, 0, 1],
    "mask": [1, 1, 0, 1],
    "turns": [
        {"start": 0, "end": 2, "role": "assistant", "calls": [["add", HOSTILE]], "reward": 0.5},
        {"start": 2, "end": 3, "role": HOSTILE},
        {"start": 3, "end": 4, "role": "assistant", "calls": []},
    ],
}


def trajectory(**changes):
    fields = {
        "reward_s": 0.5,
        "parts": {"environment": 1.0},
        "counts": {"calls": 1.0},
        "spans": [["queue", 0, 0.5], ["engine", 0.5, 2], ["environment", 2, 2.5]],
        "n_sequences": 1,
        "sequences": [copy.deepcopy(SEQUENCE)],
    }
    return fields | changes


def with_trajectory(step=1, reward=0.0, **changes):
    return sample(step, reward=reward, trajectory=trajectory(**changes))


def test_the_page_has_the_turns_values_and_times_of_a_trajectory(tmp_path):
    run = write_run(
        tmp_path / "x", [{"step": 1, "reward/mean": 0.5}], [sample(1), with_trajectory()]
    )
    _, page = page_of(run)
    data = data_of(page)
    assert len(data["samples"]) == 2
    (row,) = data["trajectories"]
    assert (row["step"], row["kind"], row["finish"], row["n_tokens"]) == (1, "train", "stop", 4)
    assert row["n_turns"] == 2 and row["n_sequences"] == 1
    assert row["difference"] == 0.75  # of the trained tokens: not the 9 of the observation
    assert row["spans"][1] == ["engine", 0.5, 2] and row["reward_s"] == 0.5
    (sequence,) = row["sequences"]
    assert sequence["tokens"] == SEQUENCE["tokens"] and sequence["mask"] == [1, 1, 0, 1]
    assert [t["reward"] for t in sequence["turns"]] == [0.5, None, None]
    assert [t["role"] for t in sequence["turns"]] == ["assistant", HOSTILE, "assistant"]
    assert sequence["turns"][0]["calls"] == [["add", HOSTILE]]
    ids = {attrs.get("id") for _, attrs in page.elements}
    assert {"trajectories", "t-order", "t-color", "t-timeline", "t-turns"} <= ids


def test_nothing_in_a_trajectory_becomes_markup_or_script(tmp_path):
    text, page = page_of(write_run(tmp_path / "x", [], [with_trajectory()]))
    assert len(page.scripts) == 2 and "alert(1)</script>" not in text and "<b>" not in text
    assert "innerHTML" not in text and "document.write" not in text


def test_a_run_without_trajectories_has_none(tmp_path):
    run = write_run(tmp_path / "x", [], [sample(1)])
    assert page_data(read_record(run), "x")["trajectories"] == []


def test_turns_of_a_record_without_its_middle_point_to_the_tokens_that_it_has():
    turns = [{"start": a, "end": b, "role": "user"} for a, b in ((0, 1), (1, 7), (7, 8))]
    found = read_sequence(SEQUENCE | {"n_tokens": 8, "kept": [[0, 2], [6, 8]], "turns": turns})
    assert found is not None and found["n_left_out"] == 4
    # tokens 0 1 6 7 are in the record; the second turn has 1 to 6 of the response
    assert [(t["start"], t["end"]) for t in found["turns"]] == [(0, 1), (1, 3), (3, 4)]
    assert [t["n_tokens"] for t in found["turns"]] == [1, 6, 1]


ODD = [
    {"tokens": "abcd"},
    {"tokens": [1, 2, 3, 4]},
    {"mask": [1]},
    {"mask": None},
    {"mask": ["1"] * 4},
]


@pytest.mark.parametrize("change", ODD, ids=str)
def test_sequences_whose_lists_do_not_fit_are_left_out(change):
    assert read_sequence(SEQUENCE | change) is None
    assert read_row(with_trajectory(sequences=[SEQUENCE | change])) is None


def test_damaged_fields_are_left_out():
    damaged = {
        "logp": [1],
        "difference": "x",
        "advantage": ["NaN", None, [], True],
        "turns": [5, {"start": -1, "end": 2}, {"start": 3, "end": 1}, {"start": 0, "end": 10**40}],
        "kept": [[0], "x"],
        "n_tokens": -4,
        "prompt": [["user"], 7, ["user", ["x"]]],
    }
    found = read_sequence(SEQUENCE | damaged)
    assert found is not None and found["logp"] is found["difference"] is None
    assert math.isnan(found["advantage"][0]) and found["advantage"][1:] == [None] * 3
    assert found["turns"] == found["prompt"] == [] and found["n_tokens"] == 4
    row = read_row(
        with_trajectory(
            spans=[["engine", 2, 1], ["engine", 0, "Infinity"], 5, ["engine", 0, 1]],
            parts=[1],
            counts={"a": "x", "b": 1},
            n_sequences="many",
        )
    )
    assert row is not None and row["spans"] == [("engine", 0, 1)] and row["parts"] == {}
    assert row["counts"] == {"b": 1} and row["n_sequences"] == 1
    for odd in (None, 5, [], {}, {"sequences": 5}, {"sequences": []}):
        assert read_row(sample(1, trajectory=odd)) is None


def test_the_worst_trajectories_are_kept_if_the_page_has_no_room_for_all(monkeypatch):
    low, different, long, new, other = (
        with_trajectory(2, reward=-1.0, sequences=[SEQUENCE | {"difference": None}]),
        with_trajectory(3, reward=1.0),
        with_trajectory(4, reward=1.0, sequences=[SEQUENCE | {"n_tokens": 9, "difference": None}]),
        with_trajectory(9, reward=1.0, sequences=[SEQUENCE | {"difference": None}]),
        with_trajectory(5, reward=1.0, sequences=[SEQUENCE | {"difference": None}]),
    )
    samples = [low, different, long, other, new]
    size = max(len(json.dumps(read_row(one))) for one in samples)
    monkeypatch.setattr(module, "MAX_TRAJECTORY_CHARS", 4 * size + size // 2)
    assert [row["step"] for row in trajectory_rows(samples)] == [2, 3, 4, 9]
