"""Reads rows from parquet, JSONL, JSON and arrow files, dataset folders, the hub, and globs."""

import contextlib
import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.data.sources import hub, layout
from jaxrl.data.sources.layout import DatasetPart
from jaxrl.json_text import read_object

_SAVE_AGAIN = "save the dataset again"
_OPTIONS = re.compile(r"\?(?=\w+=)")  # a "?" without "name=" is a wildcard


def read_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, row) for every row; place is "file:row" for error messages, counted from 1.

    `source` is a file (.parquet, .jsonl, .json with a list, .arrow), a glob pattern of files, a
    folder (the output of `datasets`' save_to_disk, or files as on the hub), or "hf:org/name". A
    folder or dataset with several splits needs "folder?split=train", one with several subsets
    "folder?split=train&subset=main".

    Raises FileNotFoundError if there is no such file, ValueError if it cannot be read.
    """
    readers = {".parquet": _parquet, ".arrow": _arrow, ".jsonl": _jsonl, ".json": _json}
    for path in find_files(source):
        for number, row in enumerate(readers[path.suffix](path), start=1):
            yield f"{path}:{number}", row


def find_files(source: str) -> list[Path]:
    """The files of a source, with shards in order."""
    name, part = _part_of(source)
    if name.startswith(hub.PREFIX):
        return hub.hub_files(name, part)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder_files(path, part)
    paths = (
        [path]
        if path.is_file()
        else [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
    )
    if not paths:
        raise FileNotFoundError(
            f"{name} is not a file, a folder or a pattern that matches a file; set data.train and "
            "data.val to files (.parquet, .jsonl), dataset folders, hub ids such as 'hf:org/name', "
            "or tasks such as 'task:addition?digits=1,2'"
        )
    if part != DatasetPart():
        raise ValueError(f"{source}: a file or pattern has no splits; remove the part after '?'")
    for found in paths:
        if found.suffix not in layout.SUFFIXES:
            raise ValueError(
                f"{found} is not one of {', '.join(layout.SUFFIXES)}; convert it to parquet or "
                "JSONL"
            )
    return paths


def _part_of(source: str) -> tuple[str, DatasetPart]:
    """(name, part) of "name?split=train&subset=main". Raises ValueError for other options."""
    name, *rest = _OPTIONS.split(source, maxsplit=1)
    options = dict(parse_qsl(rest[0], keep_blank_values=True)) if rest else {}
    if unknown := sorted(set(options) - {"split", "subset"}):
        raise ValueError(
            f"{source} has the option {unknown[0]}; a file, folder or dataset has split and subset"
        )
    return name, DatasetPart(**options)


def _folder_files(folder: Path, part: DatasetPart) -> list[Path]:
    if (index := folder / "dataset_dict.json").is_file():  # DatasetDict.save_to_disk
        names = _file_names(read_object(index, _SAVE_AGAIN).get("splits"), index)
        split = names[0] if len(names) == 1 and not part.split else part.split
        if split not in names:
            raise ValueError(
                f"{folder} has the splits {', '.join(names)}, requested is "
                f"{repr(split) if split else 'none'}; write {folder}?split={names[0]}"
            )
        return _folder_files(folder / split, DatasetPart())
    if (index := folder / "state.json").is_file():  # Dataset.save_to_disk
        shards = read_object(index, _SAVE_AGAIN).get("_data_files")
        shards = shards if isinstance(shards, list) else [shards]
        names = [shard.get("filename") if isinstance(shard, dict) else shard for shard in shards]
        return [folder / name for name in _file_names(names, index)]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    chosen = layout.choose_files(names, layout.read_card(folder), part, str(folder))
    return [folder / name for name in chosen]


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
    with named_errors(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _arrow(path: Path) -> Iterator[dict[str, Any]]:
    with named_errors(path), pa.memory_map(str(path)) as mapped:
        for batch in open_arrow(mapped):
            batch.validate(full=True)  # offsets of a damaged file could point outside of it
            yield from batch.to_pylist()


def open_arrow(mapped: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """The batches of the stream format, which `datasets` writes, or of the file format."""
    try:
        return iter(pa.ipc.open_stream(mapped))
    except pa.ArrowInvalid:
        file = pa.ipc.open_file(mapped)
        return (file.get_batch(i) for i in range(file.num_record_batches))


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with (
        named_errors(path, (UnicodeDecodeError,)),
        path.open(encoding="utf-8", newline="\n") as lines,
    ):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield parse_line(line, f"{path}:{number}")


def parse_line(line: str, place: str) -> dict[str, Any]:
    """The object in a line of JSONL. Raises ValueError with the place."""
    row = _parse(line, place, "write one object per line")
    if not isinstance(row, dict):
        raise ValueError(f"{place} is not a JSON object; write one object per line")
    return row


def _json(path: Path) -> Iterator[dict[str, Any]]:
    """Reads a list of objects, or lines with one object each, as some datasets of the hub have."""
    with named_errors(path, (UnicodeDecodeError,)):
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            yield from _jsonl(path)
            return
        rows = _parse(text, str(path), "write a list of objects")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path} is not a list of objects; write one, or JSONL")
        yield from rows


@contextlib.contextmanager
def named_errors(path: Path, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
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
