"""Tests of jaxrl/notebook/run_folder.py: what a notebook shows of a run's folder."""

import base64
import importlib.util
import json

import pytest

from jaxrl.notebook import RunFolder
from jaxrl.notebook.run_folder import importlib as used_importlib

METRICS = [
    {"step": 0, "time": 1.0, "val/reward": 0.25},
    {"step": 1, "time": 2.0, "reward/mean": 0.5},
    {"step": 2, "time": 3.0, "reward/mean": 0.75},
    {"step": 2, "time": 3.0, "val/reward": 0.5},
]
SAMPLES = [{"step": 1, "kind": "train", "completion": "</iframe><b>", "reward": 1.0}]


@pytest.fixture
def run(tmp_path):
    for name, lines in (("metrics", METRICS), ("samples", SAMPLES)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return RunFolder(tmp_path)


@pytest.fixture
def without_pandas(monkeypatch):
    monkeypatch.setattr(used_importlib.util, "find_spec", lambda name: None)


def test_metrics_have_a_row_per_step_and_samples_a_row_per_response(run, without_pandas):
    assert run.metrics == [
        {"step": 0, "val/reward": 0.25},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.75, "val/reward": 0.5},
    ]
    assert run.samples == SAMPLES


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_metrics_are_a_table_with_pandas(run):
    table = run.metrics
    assert list(table["step"]) == [0, 1, 2] and table["reward/mean"].isna().tolist()[0]


def test_the_curve_is_a_picture_once_there_are_rewards(run, tmp_path):
    html = run._repr_html_()
    data = html.partition("base64,")[2].partition('"')[0]
    assert base64.b64decode(data).startswith(b"<svg")
    (tmp_path / "empty").mkdir()
    assert RunFolder(tmp_path / "empty")._repr_html_() is None


def test_the_report_is_shown_in_a_frame_whose_page_cannot_leave_it(run):
    report = run.report()
    assert report.path.name == "report.html"
    shown = report._repr_html_()
    assert shown.count("</iframe>") == 1 and shown.count('srcdoc="') == 1
    assert "<script" not in shown  # the page is escaped


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        _ = RunFolder(tmp_path / "none").metrics
    with pytest.raises(ValueError, match="is not a run folder with a config"):
        RunFolder(tmp_path).export(tmp_path / "model")
