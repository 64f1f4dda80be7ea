"""Reads rows from parquet, JSONL, JSON and arrow files, Hugging Face dataset folders and globs."""

import contextlib
import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.data.json_object import read_object

_SUFFIXES = (".parquet", ".jsonl", ".json", ".arrow")
_SAVE_AGAIN = "save the dataset again"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev")


def read_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, row) for every row; place is "file:row" for error messages, counted from 1.

    `source` is a file (.parquet, .jsonl, .json with a list, .arrow), a glob pattern of files, or a
    folder: the output of `datasets`' save_to_disk, or parquet, JSONL or arrow files as on the hub.
    A folder with several splits needs "folder?split=train".

    Raises FileNotFoundError if there is no such file, ValueError if it cannot be read.
    """
    readers = {".parquet": _parquet, ".arrow": _arrow, ".jsonl": _jsonl, ".json": _json}
    for path in find_files(source):
        for number, row in enumerate(readers[path.suffix](path), start=1):
            yield f"{path}:{number}", row


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
    if (index := folder / "dataset_dict.json").is_file():  # DatasetDict.save_to_disk
        splits = read_object(index, _SAVE_AGAIN).get("splits")
        names = _file_names(splits, index)
        return _folder_files(folder / _choose_split(folder, names, split), "")
    if (index := folder / "state.json").is_file():  # Dataset.save_to_disk
        shards = read_object(index, _SAVE_AGAIN).get("_data_files")
        shards = shards if isinstance(shards, list) else [shards]
        names = [shard.get("filename") if isinstance(shard, dict) else shard for shard in shards]
        return [folder / name for name in _file_names(names, index)]

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


def _file_names(names: Any, index: Path) -> list[str]:
    """The names, if they are a list of files or folders next to `index`."""
    names = names if isinstance(names, list) and names else [names]
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(
                f"{index} names {repr(name)[:80]}, which is not a file of its folder; {_SAVE_AGAIN}"
            )
    return names


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    with _named_errors(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the stream format, which `datasets` writes, and the file format."""
    with _named_errors(path), pa.memory_map(str(path)) as mapped:
        try:
            batches = iter(pa.ipc.open_stream(mapped))
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(mapped)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        for batch in batches:
            batch.validate(full=True)  # offsets of a damaged file could point outside of it
            yield from batch.to_pylist()


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with (
        _named_errors(path, (UnicodeDecodeError,)),
        path.open(encoding="utf-8", newline="\n") as lines,
    ):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                row = _parse(line, f"{path}:{number}", "write one object per line")
                if not isinstance(row, dict):
                    raise ValueError(
                        f"{path}:{number} is not a JSON object; write one object per line"
                    )
                yield row


def _json(path: Path) -> Iterator[dict[str, Any]]:
    with _named_errors(path, (UnicodeDecodeError,)):
        rows = _parse(path.read_text(encoding="utf-8"), str(path), "write a list of objects")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path} is not a list of objects; write one, or JSONL")
        yield from rows


@contextlib.contextmanager
def _named_errors(path: Path, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Turns errors of a reader into ValueErrors with the file's name."""
    try:
        yield
    except kinds as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{path} cannot be read as {path.suffix} ({reason})") from error


def _parse(text: str, place: str, advice: str) -> Any:
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair is valid JSON, but not text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(f"{place} is nested too deeply; {advice}") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} has text that is not Unicode ({error.reason})") from error
    except ValueError as error:
        raise ValueError(f"{place} is not JSON ({error}); {advice}") from error
    return value
