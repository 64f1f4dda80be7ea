"""Tests of jaxrl/tracking/json_lines.py: no complete line is lost or changed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.tracking.json_lines import JsonLines, read_lines

SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r"  # str.splitlines splits at each of them


def write(path, records, *, resume_step=None):
    lines = JsonLines(path, resume_step=resume_step)
    lines.write(*records)
    lines.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("lines") / "samples.jsonl"


@given(text=st.text(st.characters(exclude_categories=())) | st.text(SEPARATORS, min_size=1))
def test_any_text_is_read_back_and_survives_a_resume(path, text):
    records = [{"step": step, "completion": f"{step}{text}"} for step in (1, 2, 3)]
    write(path, records)
    written = path.read_bytes()
    assert read_lines(path) == records
    write(path, (), resume_step=3)
    assert path.read_bytes() == written
    write(path, records[1:], resume_step=1)
    assert path.read_bytes() == written


def test_a_resume_keeps_the_bytes_of_the_lines_up_to_its_step(tmp_path):
    path = tmp_path / "samples.jsonl"
    kept = b'{"step":1,  "a": "\xe2\x80\xa8"}\r\n{"step": 1, "a": "\xff"}\n{"damaged\n\n[]\n'
    path.write_bytes(kept + b'{"step": 2, "a": "later"}\n{"step": 1, "trunca')
    write(path, (), resume_step=1)
    assert path.read_bytes() == kept


def test_a_damaged_step_number_does_not_cost_the_lines_after_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}).encode() + b"\n" for step in (1, 9, 2, 3, 4)]
    path.write_bytes(b"".join(lines))
    write(path, [{"step": 4}], resume_step=3)
    assert path.read_bytes() == b"".join([lines[0], *lines[2:]])
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]
