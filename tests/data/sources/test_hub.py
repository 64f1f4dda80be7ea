"""Tests of jaxrl/data/sources/hub.py and layout.py: the files of a dataset id or folder."""

import errno
import json
import os
from pathlib import Path

import huggingface_hub
import pytest

from jaxrl.data.sources import hub
from jaxrl.data.sources.files import find_files, read_rows
from jaxrl.data.sources.layout import DatasetPart, choose_files

COMMIT = "a" * 40
GSM8K = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# GSM8K
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache, without network, with one dataset in two subsets."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "datasets--openai--gsm8k"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "refs" / "v1").write_text(COMMIT)
    files = {"README.md": GSM8K}
    for name in ("main/train-00000-of-00002", "main/train-00001-of-00002", "main/test-0"):
        files[f"{name}.jsonl"] = json.dumps({"question": name, "answer": "1"}) + "\n"
    for name, text in files.items():  # as the hub's client writes them: links to blobs
        blob, link = folder / "blobs" / name.replace("/", "-"), folder / "snapshots" / COMMIT / name
        blob.parent.mkdir(exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text(text)
        link.symlink_to(blob)
    return folder


@pytest.mark.parametrize("revision", ["", "@v1", f"@{COMMIT}"])
def test_a_dataset_in_the_cache_is_read_without_network(cache, revision):
    rows = read_rows(f"hf:openai/gsm8k{revision}?split=train&subset=main")
    names = ["main/train-00000-of-00002", "main/train-00001-of-00002"]
    assert [row["question"] for _, row in rows] == names


def test_a_snapshot_folder_is_read_as_the_dataset(cache):
    files = find_files(f"{cache / 'snapshots' / COMMIT}?subset=main&split=test")
    assert [f.name for f in files] == ["test-0.jsonl"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:openai/gsm8k?split=train", r"has the subsets main, socratic, requested is none"),
        ("hf:openai/gsm8k?subset=main", r"has the splits train, test, requested is none"),
        ("hf:openai/gsm8k?subset=mian", r"requested is 'mian'; write \?subset=main"),
        (
            "hf:openai/gsm8k?subset=socratic",
            r"no files of the split 'train' .*the hub cannot be reached",
        ),
        ("hf:openai/gsm8k@v2", r"'openai/gsm8k' at the revision 'v2' is not in the cache .*/hub"),
        ("hf:openai/gsm9k", r"'openai/gsm9k' is not in the cache .*hf download openai/gsm9k"),
        ("hf:a/b/c", r"is not the id of a dataset; write hf:org/name"),
        ("hf:openai/gsm8k?name=main", r"has the option name; .* has split and subset"),
    ],
)
def test_a_part_or_dataset_that_is_not_there_is_one_clear_error(cache, source, message):
    with pytest.raises(ValueError, match=message):
        find_files(source)


def test_a_download_without_room_names_the_cache(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub, "snapshot_download", full)
    with pytest.raises(ValueError, match=r"dataset 'a/b' cannot be .* is full.*set HF_HOME"):
        find_files("hf:a/b")


def test_a_missing_shard_is_an_error(cache):
    (cache / "snapshots" / COMMIT / "main" / "train-00001-of-00002.jsonl").unlink()
    message = r"lacks 1 of the 2 files main/train-\*-of-00002\.jsonl, the first is number 1"
    with pytest.raises(ValueError, match=message):
        find_files("hf:openai/gsm8k?split=train&subset=main")


def test_only_the_files_of_the_part_are_downloaded(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text(GSM8K)
    asked = []

    def download(repo, *, repo_type, revision, allow_patterns):
        asked.append((repo, repo_type, revision, allow_patterns))
        return str(tmp_path)

    class Api:
        def list_repo_files(self, repo, *, repo_type, revision):
            return ["README.md", "main/train-0.parquet", "main/test-0.parquet"]

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "HfApi", Api)
    [file] = find_files("hf:openai/gsm8k@v1?split=test&subset=main")
    assert file == tmp_path / "main" / "test-0.parquet"
    assert [(revision, files) for _, _, revision, files in asked] == [
        ("v1", ["README.md", ".gitattributes"]),
        (tmp_path.name, ["main/test-0.parquet"]),
    ]


@pytest.mark.parametrize(
    ("names", "card", "part", "chosen"),
    [
        (
            ["a/train/0.parquet", "b/train/0.parquet"],
            {},
            DatasetPart(subset="a"),
            ["a/train/0.parquet"],
        ),
        (["x/one.jsonl", "y/two.jsonl"], {}, DatasetPart(), ["x/one.jsonl", "y/two.jsonl"]),
        (["rows.json", "rows.parquet"], {}, DatasetPart(), ["rows.parquet"]),
        (["rows.json", "dataset_infos.json"], {}, DatasetPart(split="train"), ["rows.json"]),
        (["a.csv", "b.json"], {"configs": [{"data_files": "*.json"}]}, DatasetPart(), ["b.json"]),
        (["a/x.json", "b/x.json"], {"configs": [{"data_dir": "b"}]}, DatasetPart(), ["b/x.json"]),
    ],
)
def test_files_are_chosen_by_readme_or_by_name(names, card, part, chosen):
    assert choose_files(names, card, part, "set") == chosen


def test_a_split_in_several_subsets_needs_one(tmp_path):
    names = ["a/train/0.parquet", "b/train/0.parquet"]
    with pytest.raises(ValueError, match=r"set has the subsets a, b, requested is none"):
        choose_files(names, {}, DatasetPart(split="train"), "set")
    with pytest.raises(FileNotFoundError, match=r"set has no \.parquet, .* but a\.csv; set data"):
        choose_files(["a.csv"], {}, DatasetPart(), "set")


def test_a_damaged_readme_is_named(tmp_path):
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"README\.md has a YAML block that cannot be read"):
        find_files(str(tmp_path))


def test_lines_of_objects_in_a_json_file_are_rows(tmp_path):
    path = Path(tmp_path / "train.json")
    path.write_text('{"question": "a"}\n{"question": "b"}\n')
    assert [row["question"] for _, row in read_rows(str(path))] == ["a", "b"]
