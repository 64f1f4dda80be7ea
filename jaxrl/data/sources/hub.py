"""Datasets of the Hugging Face hub: hf:org/name@revision?split=train&subset=main.

Files are downloaded into the hub's cache once. Without network they are read from there.
"""

import dataclasses
import logging
import re
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download

from jaxrl.config.disk import is_full
from jaxrl.data.sources.layout import (
    README,
    SUFFIXES,
    DatasetPart,
    choose_files,
    is_data,
    read_card,
)

PREFIX = "hf:"
CONVERTED = "refs/convert/parquet"  # the branch where the hub keeps datasets as parquet
_FORM = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+|[\w.-]+)(?:@(?P<revision>[\w./-]+))?")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """The files of a dataset at one commit; some may not be on this machine yet."""

    folder: Path  # in the cache
    names: list[str]
    offline: str  # why the hub was not reached; "" if it was


def hub_files(name: str, part: DatasetPart) -> list[Path]:
    """The files of a part of the dataset `name`, "hf:org/name@revision", in the hub's cache.

    Raises ValueError if the dataset is not in the cache and cannot be downloaded, and the errors of
    `choose_files`.
    """
    match = _FORM.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{name!r} is not the id of a dataset; write hf:org/name, hf:org/name@revision or "
            "hf:org/name@revision?split=train&subset=main"
        )
    repo, revision = match["repo"], match["revision"]
    snapshot = _open(repo, revision)
    if not revision and not snapshot.offline and not any(map(is_data, snapshot.names)):
        snapshot = _open(repo, CONVERTED)  # the dataset has CSV, text or a script
    try:
        chosen = choose_files(snapshot.names, read_card(snapshot.folder), part, name)
    except (ValueError, FileNotFoundError) as error:
        if not snapshot.offline:
            raise
        raise ValueError(
            f"{error} (in the cache {snapshot.folder}; the hub cannot be reached: "
            f"{snapshot.offline})"
        ) from error
    if not snapshot.offline:
        _download(repo, snapshot.folder.name, chosen)
    logger.info("%s is commit %s", name, snapshot.folder.name)
    return [snapshot.folder / file for file in chosen]


def _open(repo: str, revision: str | None) -> _Snapshot:
    """The dataset at a revision: its commit, README and list of files."""
    folder = _download(repo, revision, [README, ".gitattributes"])
    try:
        names = HfApi().list_repo_files(repo, repo_type="dataset", revision=folder.name)
    except Exception as error:  # the hub's client changes between versions
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        names = [p.relative_to(folder).as_posix() for p in files]
        return _Snapshot(folder, names, offline=client_error(error))
    return _Snapshot(folder, names, offline="")


def _download(repo: str, revision: str | None, files: list[str]) -> Path:
    """The snapshot folder with these files, from the hub or its cache."""
    try:
        folder = snapshot_download(
            repo, repo_type="dataset", revision=revision, allow_patterns=files
        )
    except Exception as error:  # the hub's client changes between versions
        raise_if_full(error, f"the dataset {repo!r}")
        at = f" at the revision {revision!r}" if revision else ""
        flag = " --revision " + revision if revision else ""
        raise ValueError(
            f"the dataset {repo!r}{at} is not in the cache {constants.HF_HUB_CACHE}, and the hub "
            f"gave {client_error(error)}. Make the hub reachable (HF_TOKEN for gated datasets, "
            "HF_ENDPOINT for a mirror, HF_HUB_OFFLINE unset), copy a cache filled by 'hf download "
            f"{repo} --repo-type dataset{flag}' and set HF_HOME, or set data.train to a folder "
            f"with {', '.join(SUFFIXES[:3])} files"
        ) from error
    return Path(folder)


def raise_if_full(error: Exception, what: str) -> None:
    """Raises ValueError if the hub's client failed because the disk of its cache is full."""
    if is_full(error):
        raise ValueError(
            f"{what} cannot be downloaded: the disk of the cache {constants.HF_HUB_CACHE} is full; "
            "free disk space, or set HF_HOME to a folder on another disk"
        ) from error


def client_error(error: Exception) -> str:
    """The kind of an error of the hub's client and the first line of its text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
