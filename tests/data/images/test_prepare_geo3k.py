"""Tests of scripts/prepare_geo3k.py."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.images.pictures import encoded, picture

SCRIPT = Path(__file__).parents[3] / "scripts" / "prepare_geo3k.py"
ROW = {
    "images": [{"bytes": encoded(picture(24, 8)), "path": None}],
    "problem": "<image>Find x.",
    "answer": "3",
}


def run(folder, *rows):
    (folder / "in" / "data").mkdir(parents=True, exist_ok=True)
    path = folder / "in" / "data" / "train-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    arguments = ["--input", str(folder / "in"), "--output", str(folder / "out")]
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_geo3k_becomes_prompts_with_images(load, tmp_path):
    done = run(tmp_path, ROW, {**ROW, "answer": "2 \\sqrt { 221 }"})
    assert done.returncode == 0, done.stderr
    prompts = load(str(tmp_path / "out" / "train.parquet"))
    assert [p.answer for p in prompts] == ["3", "2 \\sqrt { 221 }"]
    assert {p.source for p in prompts} == {"hiyouga/geometry3k"}
    assert [placed.image.n_tokens for placed in prompts[0].images] == [3]
    assert "Find x. You FIRST think" in prompts[0].messages[0]["content"]
    assert (prompts[1].extra["split"], prompts[1].extra["index"]) == ("train", 1)


def test_another_row_is_an_error_with_its_place(tmp_path):
    failed = run(tmp_path, ROW, {**ROW, "problem": "Find x."})
    assert failed.returncode != 0
    assert "train-00000-of-00001.parquet:2 is not a Geometry3K row" in failed.stderr
