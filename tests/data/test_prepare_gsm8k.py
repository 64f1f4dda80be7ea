"""Tests of scripts/prepare_gsm8k.py."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from jaxrl.config.keys import DataConfig
from jaxrl.data.items import load_items
from jaxrl.data.prompts import prompt_maker
from jaxrl.rewards.verifiers.gsm8k import gsm8k

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_gsm8k.py"
ROWS = [
    {"question": "Clips in all?", "answer": "48+24 = <<48+24=72>>72 clips.\n#### 72"},
    {"question": "Dollars?", "answer": "Many.\n#### 1,250"},
]


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )


def test_gsm8k_becomes_prompts_in_verls_schema(tmp_path, renderer):
    for split in ("train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in ROWS)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    done = run("--input", tmp_path, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr

    table = pq.read_table(tmp_path / "out" / "test.parquet")
    expected = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert table.column_names == expected
    maker = prompt_maker(renderer, DataConfig())
    prompts = load_items([str(tmp_path / "out" / "train.parquet")], maker)
    assert [p.answer for p in prompts] == ["72", "1250"]
    assert {p.source for p in prompts} == {"openai/gsm8k"}
    assert prompts[0].messages[0]["content"].startswith("Clips in all? Let's think step by step")
    assert (prompts[1].extra["split"], prompts[1].extra["index"]) == ("train", 1)
    for prompt, row in zip(prompts, ROWS, strict=True):
        assert gsm8k(prompt.source, row["answer"], prompt.answer, prompt.extra) == 1


def test_other_files_are_an_error_with_the_place(tmp_path):
    assert (
        "neither train.jsonl nor test.jsonl"
        in run("--input", tmp_path, "--output", tmp_path).stderr
    )
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    failed = run("--input", tmp_path, "--output", tmp_path)
    assert failed.returncode != 0 and "train.jsonl:1 is not a GSM8K row" in failed.stderr
