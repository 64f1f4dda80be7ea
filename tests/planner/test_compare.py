"""Comparison of plans (jaxrl/planner/compare.py)."""

import json
import pathlib

import pytest

from jaxrl.plan import main, read
from jaxrl.planner.compare import comparison_text


def test_a_comparison_has_the_numbers_that_differ_and_their_ratio():
    a = {
        "fits": True,
        "phases": {"update": {"live_bytes": 2**30, "roofline_s": 2.0}},
        "kv_pages": 8,
    }
    b = {
        "fits": False,
        "phases": {"update": {"live_bytes": 2**29, "roofline_s": 2.0}},
        "kv_pages": 8,
    }
    text = comparison_text(a, b, ("before", "after"))
    rows = [line.split() for line in text.splitlines()]
    assert ["fits", "yes", "no", "0.00x"] in rows
    assert ["phases/update/live_bytes", "1.00", "GiB", "512.00", "MiB", "0.50x"] in rows
    assert "2 other numbers are equal within 0.5%" in text and "kv_pages" not in text
    assert comparison_text(a, a, ("a", "b")).startswith("equal: all 4 numbers")


def test_a_program_of_one_plan_only_is_shown():
    a, b = {"programs": {"score": {"flops": 2e12}}}, {"programs": {}}
    assert "programs/score/flops" in comparison_text(a, b, ("a", "b"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["missing.json", "missing.json"], "No such file"),
        (["only.json"], "--compare takes two files"),
        (["text.json", "text.json"], "is not JSON"),
        (["list.json", "list.json"], "is not a plan"),
    ],
)
def test_files_that_are_not_plans_are_rejected(files, message, tmp_path):
    (tmp_path / "text.json").write_text("plan")
    (tmp_path / "list.json").write_text(json.dumps([1]))
    paths = [str(pathlib.Path(tmp_path / name)) for name in files]
    with pytest.raises(SystemExit, match=message):
        main(read(["--compare", *paths]))
