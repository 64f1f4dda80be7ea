"""The temporary folder of an untrusted program, its size, and its removal in the background.

A folder is locked as long as its process lives. Folders without a lock are of processes that were
killed: the next process that makes a folder removes them, and so does the end of a RewardPool.
"""

import atexit
import contextlib
import errno
import fcntl
import functools
import itertools
import logging
import math
import os
import queue
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _NEW = "jaxrl-code-", "jaxrl-new-"
_RETRY_S = 5.0  # a killed process may finish its last system call
_EXIT_S = 5.0  # in which the end of this process waits for removals
log = logging.getLogger(__name__)


@contextlib.contextmanager
def temporary_folder(*names: str) -> Iterator[Path]:
    """A folder with empty folders of these names. A thread removes it after the block."""
    new = Path(tempfile.mkdtemp(prefix=_NEW))
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = new.rename(new.with_name(_PREFIX + new.name.removeprefix(_NEW)))
    folder.chmod(0o711)  # the program may run as another user
    for name in names:
        (folder / name).mkdir(mode=0o700)
    try:
        yield folder
    finally:
        _removals().put((folder, lock))


def wait_for_removals(limit_s: float = math.inf) -> None:
    """Waits until the folders of all ended programs of this process are removed."""
    end = time.monotonic() + limit_s
    while _removals().unfinished_tasks and time.monotonic() < end:
        time.sleep(0.01)


def remove_left(limit_s: float) -> None:
    """Removes the folders that killed processes of this user left, for `limit_s` at most."""
    end = time.monotonic() + limit_s
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # locked, another user's, or just removed
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(path)
            finally:
                os.close(lock)
        if time.monotonic() > end:
            return


def is_larger(top: Path, *, n_entries: int, n_bytes: int) -> bool:
    """Whether a folder has more entries, or more bytes in files. Stops counting there."""
    folders = [str(top)]
    while folders:
        try:
            for path, is_folder, size in _scan(folders.pop()):
                n_entries, n_bytes = n_entries - 1, n_bytes - size
                if n_entries < 0 or n_bytes < 0:
                    return True
                folders += [path] * is_folder
        except OSError as error:  # just removed or moved, unless it is too deep to be read
            if error.errno == errno.ENAMETOOLONG:
                return True
    return False


def _scan(folder: str) -> Iterator[tuple[str, bool, int]]:
    """(path, whether it is a folder, bytes on the disk) of the entries of a folder."""
    try:
        entries = os.scandir(folder)
    except PermissionError:
        os.chmod(folder, 0o700)
        entries = os.scandir(folder)
    with entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield entry.path, stat.S_ISDIR(found.st_mode), found.st_blocks * 512


@functools.cache
def _removals() -> queue.Queue[tuple[Path, int]]:
    """The folders to remove, with their locks; a thread does it."""
    jobs: queue.Queue[tuple[Path, int]] = queue.Queue()
    threading.Thread(target=_remove_all, args=(jobs,), daemon=True).start()
    atexit.register(wait_for_removals, _EXIT_S)
    return jobs


def _remove_all(jobs: queue.Queue[tuple[Path, int]]) -> None:
    remove_left(math.inf)
    while True:
        folder, lock = jobs.get()
        try:
            remove(folder)
        except OSError as error:
            log.warning("cannot remove the folder of a program (%s); remove %s", error, folder)
        finally:
            os.close(lock)
            jobs.task_done()


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
