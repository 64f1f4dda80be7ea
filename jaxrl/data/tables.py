"""Reads rows from parquet, JSONL, JSON and arrow files, Hugging Face dataset folders and globs."""

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_SUFFIXES = (".parquet", ".jsonl", ".json", ".arrow")
_SPLITS = ("train", "test", "validation", "valid", "val", "dev")


def read_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, row) for every row; place is "file:row" for error messages, counted from 1.

    `source` is a file (.parquet, .jsonl, .json with a list, .arrow), a glob pattern of files, or a
    folder: the output of `datasets`' save_to_disk, or parquet, JSONL or arrow files as on the hub.
    A folder with several splits needs "folder?split=train".

    Raises FileNotFoundError if there is no such file, ValueError if it cannot be read.
    """
    for path in find_files(source):
        reader = {".parquet": _parquet, ".arrow": _arrow, ".jsonl": _jsonl, ".json": _json}
        try:
            for number, row in enumerate(reader[path.suffix](path), start=1):
                yield f"{path}:{number}", row
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read as {path.suffix} ({error})") from error


def find_files(source: str) -> list[Path]:
    """The files of a source, with shards in order."""
    name, _, split = source.partition("?split=")
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder_files(path, split)
    paths = (
        [path]
        if path.is_file()
        else [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
    )
    if not paths:
        raise FileNotFoundError(
            f"{name} is not a file, a folder or a pattern that matches a file; set data.train and "
            "data.val to files (.parquet, .jsonl), dataset folders, or tasks such as "
            "'task:addition?digits=1,2'"
        )
    for found in paths:
        if found.suffix not in _SUFFIXES:
            raise ValueError(
                f"{found} is not one of {', '.join(_SUFFIXES)}; convert it to parquet or JSONL"
            )
    return paths


def _folder_files(folder: Path, split: str) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():  # DatasetDict.save_to_disk
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return _folder_files(folder / _choose_split(folder, splits, split), "")
    if (folder / "state.json").is_file():  # Dataset.save_to_disk
        shards = json.loads((folder / "state.json").read_text())["_data_files"]
        return [folder / shard["filename"] for shard in shards]

    files = [p for p in sorted(folder.rglob("*")) if p.suffix in (".parquet", ".jsonl", ".arrow")]
    if not files:
        raise FileNotFoundError(
            f"{folder} has no .parquet, .jsonl or .arrow file; set data.train to a folder that has"
        )
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    if not split and not set(by_split) & set(_SPLITS):
        return files
    return by_split[_choose_split(folder, list(by_split), split)]


def _choose_split(folder: Path, splits: list[str], split: str) -> str:
    if not split and len(splits) == 1:
        return splits[0]
    if split not in splits:
        raise ValueError(
            f"{folder} has the splits {', '.join(splits)}, requested is "
            f"{repr(split) if split else 'none'}; write {folder}?split={splits[0]}"
        )
    return split


def _split_of(file: Path) -> str:
    """ "train" for train-00000-of-00002.parquet, train.parquet and train/0000.parquet."""
    names = (file.stem.split("-")[0], file.parent.name)
    return next((name for name in names if name in _SPLITS), names[0])


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the stream format, which `datasets` writes, and the file format."""
    with pa.memory_map(str(path)) as mapped:
        try:
            batches = iter(pa.ipc.open_stream(mapped))
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(mapped)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        for batch in batches:
            yield from batch.to_pylist()


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(line, f"{path}:{number}")


def _json(path: Path) -> Iterator[dict[str, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not a list of objects; write one, or JSONL")
    yield from rows


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is not a JSON object; write one object per line")
    return row
