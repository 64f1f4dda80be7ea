"""The temporary folder of an untrusted program, and its removal."""

import contextlib
import itertools
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_RETRY_S = 5.0  # a killed process may finish its last system call
log = logging.getLogger(__name__)


@contextlib.contextmanager
def temporary_folder(*names: str) -> Iterator[Path]:
    """A folder with empty folders of these names. It is removed at the end, whatever is in it."""
    folder = Path(tempfile.mkdtemp(prefix="jaxrl-code-"))
    folder.chmod(0o711)  # the program may run as another user
    for name in names:
        (folder / name).mkdir(mode=0o700)
    try:
        yield folder
    finally:
        try:
            remove(folder)
        except OSError as error:
            log.warning("cannot remove the folder of a program (%s); remove %s", error, folder)


def remove(folder: Path) -> None:
    """Removes a folder that has no symbolic links to folders; a jail cannot make any.

    Moves nested folders to the top instead of descending into them, so that depth needs neither
    recursion nor long paths. Raises OSError if entries still appear after some seconds.
    """
    end = time.monotonic() + _RETRY_S
    while True:
        try:
            _empty(folder)
            return folder.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.01)


def _empty(top: Path) -> None:
    """Removes everything in a folder, level by level."""
    names = (f"{uuid.uuid4().hex}-{i}" for i in itertools.count())
    while folders := _folders(top):
        for path in folders:
            for inner in _folders(path):
                os.rename(inner, top / next(names))
            os.rmdir(path)


def _folders(parent: str | Path) -> list[str]:
    """Removes the files of a folder; returns the paths of its folders."""
    with os.scandir(parent) as entries:
        folders = []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)  # to read it, to empty it and to move it
                folders.append(entry.path)
            else:
                os.unlink(entry.path)
    return folders
