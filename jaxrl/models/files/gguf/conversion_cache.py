"""Conversions of GGUF files, kept in a cache folder under the hash of the file's content."""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxrl.json_text import read_object
from jaxrl.models.files.atomic_folder import atomic_folder, write_json
from jaxrl.models.files.gguf.folder import convert_gguf

CONVERTER = 2  # raise it when the converter writes something else for the same file
RECORD = "conversion.json"  # the source of a converted folder and the sizes of its files


def cache_dir() -> Path:
    """~/.cache/jaxrl/models, or its equivalent under XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxrl" / "models"


def cached_conversion(gguf: Path) -> Path:
    """The folder converted from a GGUF file, from the cache if its content was converted before.

    A folder is used only if its record names this content and this converter, and if its files have
    the recorded sizes. Raises the errors of `convert_gguf`, and ValueError if the file changes
    during its conversion.
    """
    digest = content_digest(gguf)
    target = cache_dir() / f"{gguf.stem[:80]}-{digest[:32]}-v{CONVERTER}"
    if is_converted(target, digest):
        return target
    with one_converter():
        if not is_converted(target, digest):
            shutil.rmtree(target, ignore_errors=True)
            with atomic_folder(target) as folder:
                convert_gguf(gguf, folder)
                if content_digest(gguf) != digest:
                    raise ValueError(f"{gguf} changed while it was read; wait for its download")
                write_json(folder / RECORD, record(folder, digest))
    return target


def content_digest(path: Path) -> str:
    """SHA-256 of a file; computed once per process for an unchanged file."""
    stat = path.stat()
    return _digest(path.resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@functools.lru_cache(maxsize=64)
def _digest(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record(folder: Path, digest: str) -> dict:
    """The source that `folder` was converted from, and the sizes of its files in bytes."""
    files = (path for path in folder.iterdir() if path.name != RECORD)
    sizes = {path.name: path.stat().st_size for path in files}
    return {"sha256": digest, "converter": CONVERTER, "files": dict(sorted(sizes.items()))}


def is_converted(folder: Path, digest: str) -> bool:
    """Whether `folder` has the whole conversion of the file with this digest."""
    try:
        return read_object(folder / RECORD, "") == record(folder, digest)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def one_converter() -> Iterator[None]:
    """Waits until no other process converts into this cache; the kernel frees a killed one's lock.

    On a disk without locks, conversions that run at once are repeated work, and each is complete.
    """
    path = cache_dir().with_name("models.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
