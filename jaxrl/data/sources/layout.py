"""Subsets and splits of a dataset folder, chosen among its file names as the hub does.

The README of a folder may declare them in its YAML block (`configs` with `data_files`). Otherwise a
subset is a folder and a split is the start of a file name, or a folder:

    main/train-00000-of-00002.parquet    subset main, split train
    data/test.jsonl                      split test
"""

import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub.repocard import metadata_load

SUFFIXES = (".parquet", ".jsonl", ".arrow", ".json")
README = "README.md"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev")
_PLAIN_FOLDERS = ("", "data", *_SPLITS)  # top folders that are not subsets
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
_SHARD = re.compile(r"^(.*-)(\d{5})-of-(\d{5})(.*)$")


@dataclasses.dataclass(frozen=True)
class DatasetPart:
    """The part of a dataset that a source names; "" where it names none."""

    split: str = ""
    subset: str = ""


def choose_files(
    names: Sequence[str], card: Mapping[str, Any], part: DatasetPart, place: str
) -> list[str]:
    """The files of a split, in order. `card` is the YAML block of the README, `place` the source.

    JSON files count if there are no others. Raises FileNotFoundError if there is no file with rows,
    and ValueError with the subsets or splits that there are if the part is not one of them, or not
    given where there are several, and if a shard of the split is missing.
    """
    rows = sorted(name for name in names if is_data(name))
    if not rows:
        shown = ", ".join(names[:5]) or "no files"
        raise FileNotFoundError(
            f"{place} has no .parquet, .jsonl, .arrow or .json file, but {shown}; set data.train "
            "to a folder or dataset that has"
        )
    declared = card.get("configs")
    if isinstance(declared, list) and declared:
        splits = _declared_splits(declared, rows, part, place)
    else:
        rows = [name for name in rows if not name.endswith(".json")] or rows
        splits = _named_splits(rows, part, place)
    split = part.split
    if not split and len(splits) == 1:
        split = next(iter(splits))
    if split in splits and not splits[split]:
        raise ValueError(f"{place} has no files of the split {split!r} that its README declares")
    if split not in splits:
        raise ValueError(
            f"{place} has the splits {', '.join(splits)}, requested is "
            f"{repr(split) if split else 'none'}; write ?split={next(iter(splits))}"
        )
    _check_shards(splits[split], place)
    return splits[split]


def read_card(folder: Path) -> Mapping[str, Any]:
    """The YAML block of the folder's README; empty without one.

    Raises ValueError if it is damaged.
    """
    readme = folder / README
    if not readme.is_file():
        return {}
    try:
        return metadata_load(readme) or {}
    except Exception as error:  # of the YAML parser
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{readme} has a YAML block that cannot be read ({reason}); correct or remove it"
        ) from error


def is_data(name: str) -> bool:
    """Whether a file of this name has rows."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix in SUFFIXES and path.name not in _NOT_ROWS and not hidden


def _declared_splits(
    declared: Sequence[Any], rows: Sequence[str], part: DatasetPart, place: str
) -> dict[str, list[str]]:
    """Split -> files of the subset, from the README's list of subsets."""
    configs = {str(c.get("config_name", "default")): c for c in declared if isinstance(c, Mapping)}
    default = [n for n, c in configs.items() if c.get("default") or n == "default"]
    subset = part.subset or (next(iter(configs)) if len(configs) == 1 else "".join(default[:1]))
    if subset not in configs:
        raise ValueError(_wrong_subset(list(configs), part, place))
    files = configs[subset].get("data_files")
    if files is None:
        folder = str(configs[subset].get("data_dir", "")).strip("/")
        inside = [n for n in rows if n.startswith(f"{folder}/")] if folder else rows
        return _joined(_by_split(inside))
    if not isinstance(files, list) or not all(isinstance(f, Mapping) for f in files):
        files = [{"split": "train", "path": files}]
    return {str(f.get("split", "train")): _matching(rows, f.get("path")) for f in files}


def _matching(rows: Sequence[str], patterns: Any) -> list[str]:
    """The files that match one of the patterns, in the order of the patterns."""
    patterns = patterns if isinstance(patterns, list) else [patterns]
    found = {n: 0 for p in patterns for n in rows if fnmatch.fnmatchcase(n, str(p).lstrip("./"))}
    return list(found)


def _named_splits(rows: Sequence[str], part: DatasetPart, place: str) -> dict[str, list[str]]:
    """Split -> files, from the names of files and folders."""
    subsets = sorted({_top(name) for name in rows} - set(_PLAIN_FOLDERS))
    if part.subset:
        rows = [name for name in rows if _top(name) == part.subset]
        if not rows:
            raise ValueError(_wrong_subset(subsets, part, place))
        return _joined(_by_split(rows))
    splits = _by_split(rows)
    chosen = splits[part.split] if part.split in splits else next(iter(splits.values()))
    is_split = not set(_SPLITS).isdisjoint(splits)
    if is_split and len({_top(name) for name in chosen} - set(_PLAIN_FOLDERS)) > 1:
        raise ValueError(_wrong_subset(subsets, part, place))
    return _joined(splits)


def _by_split(rows: Sequence[str]) -> dict[str, list[str]]:
    """Name of a split, or start of a file name -> files."""
    found: dict[str, list[str]] = {}
    for name in rows:
        found.setdefault(_split_of(PurePosixPath(name)), []).append(name)
    return found


def _joined(splits: dict[str, list[str]]) -> dict[str, list[str]]:
    """The splits; all files as "train" if no name is a split's."""
    if not set(_SPLITS).isdisjoint(splits):
        return splits
    return {"train": sorted(name for files in splits.values() for name in files)}


def _split_of(file: PurePosixPath) -> str:
    """ "train" for train-00000-of-00002.parquet, train.parquet and train/0000.parquet."""
    names = (file.stem.split("-")[0], file.parent.name)
    return next((name for name in names if name in _SPLITS), names[0])


def _top(name: str) -> str:
    parts = PurePosixPath(name).parts
    return parts[0] if len(parts) > 1 else ""


def _wrong_subset(subsets: Sequence[str], part: DatasetPart, place: str) -> str:
    if not subsets:
        return f"{place} has no subsets, requested is {part.subset!r}; leave out subset"
    return (
        f"{place} has the subsets {', '.join(subsets)}, requested is "
        f"{repr(part.subset) if part.subset else 'none'}; write ?subset={subsets[0]}"
    )


def _check_shards(files: Sequence[str], place: str) -> None:
    """Raises ValueError if shards like -00001-of-00004 are missing, as after a broken download."""
    present: dict[tuple[str, int, str], set[int]] = {}
    for match in filter(None, map(_SHARD.match, files)):
        start, index, total, end = match.groups()
        present.setdefault((start, int(total), end), set()).add(int(index))
    for (start, total, end), found in present.items():
        if missing := sorted(set(range(total)) - found):
            raise ValueError(
                f"{place} lacks {len(missing)} of the {total} files {start}*-of-{total:05d}{end}, "
                f"the first is number {missing[0]}; download the dataset completely"
            )
