"""A lock on the run folder: one process at a time writes checkpoints and logs into it.

The file `run.lock` names the process that holds the folder. Two things show that it is alive: the
kernel's lock on the file (flock), which ends with the process, and a heartbeat, the file's
modification time. flock decides between processes of one machine. On a shared disk it may not reach
other hosts, so a lock of another machine counts as long as its heartbeat moves.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from jaxrl.ending import before_ending
from jaxrl.json_text import parse_json
from jaxrl.tracking.progress import Progress

NAME = "run.lock"
HEARTBEAT_S = 15.0  # between two heartbeats
STALE_S = 90.0  # a lock of another machine without a heartbeat for so long is taken over
FIRST_HEARTBEAT_S = 1.0  # notices early that two hosts took the lock at the same moment
MAX_BYTES = 1 << 16  # of a lock file that is read
POLL_S = 1.0  # between two looks at the lock of another machine
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderLockError(ValueError):
    """Another process holds the run folder, or the lock file cannot be written."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds the lock, or held it when it ended."""

    host: str
    machine: str  # boot id of its kernel
    pid: int
    since: str  # UTC
    command: str
    token: str  # of this lock

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"


UNKNOWN = Holder("an unknown host", "", 0, "an unknown time", "the lock file is damaged", "")


class FolderLock:
    """This process's lock on a run folder, refreshed by a thread until `release`."""

    def __init__(self, path: Path, fd: int):
        """Writes the lock into the file `path`, which is open and locked as `fd`."""
        self.path = path
        self.holder = this_process()
        self._fd = fd
        self._taken_by: Holder | None = None
        self._released = threading.Event()
        os.ftruncate(fd, os.pwrite(fd, json.dumps(dataclasses.asdict(self.holder)).encode(), 0))
        self._thread = threading.Thread(target=self._refresh, name="folder-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises FolderLockError if another process took the folder over."""
        if self._taken_by is not None:
            raise FolderLockError(
                f"{self.path.parent} was taken over by {self._taken_by}, because this process did "
                f"not refresh its lock for {STALE_S:.0f} s (suspended, or without access to the "
                f"disk); it stops without writing. To run both, set another config.run_dir"
            )

    def release(self) -> None:
        """Removes the lock file, unless another process took it over."""
        self._released.set()
        self._thread.join()
        self.remove()
        os.close(self._fd)

    def remove(self) -> None:
        """Removes the lock file of a process that ends, unless another one took it over."""
        with contextlib.suppress(OSError):
            if read_lock(self.path).holder == self.holder:
                self.path.unlink()

    def _refresh(self) -> None:
        wait_s = FIRST_HEARTBEAT_S
        while self._taken_by is None and not self._released.wait(wait_s):
            wait_s = HEARTBEAT_S
            with contextlib.suppress(OSError):  # a shared disk may be away for a moment
                os.utime(self._fd)
                holder = read_lock(self.path).holder
                self._taken_by = holder if holder not in (None, self.holder) else None


@contextlib.contextmanager
def lock_folder(folder: Path, progress: Progress) -> Iterator[FolderLock]:
    """Holds the lock of an existing folder for the block.

    The lock of a process of this machine that has ended is taken over at once, that of another
    machine after STALE_S without a heartbeat. Until then the heartbeat is watched. Raises
    FolderLockError if it moves, or if a process of this machine holds the lock.
    """
    path = folder / NAME
    try:
        fd = acquire(path, progress)
        try:
            lock = FolderLock(path, fd)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise FolderLockError(
            f"the lock {path} cannot be written: {error.strerror or error}; free disk space, make "
            f"the folder writable, or set another config.run_dir"
        ) from error
    try:
        with before_ending(lock.remove):
            yield lock
    finally:
        lock.release()


@dataclasses.dataclass(frozen=True)
class Seen:
    """The content of a lock file and its last heartbeat."""

    holder: Holder | None  # None if the folder is free
    beat: float  # modification time, in seconds on the clock of the disk's server

    def in_use(self, path: Path) -> FolderLockError:
        return FolderLockError(
            f"{path.parent} is in use by {self.holder or UNKNOWN}; wait until that run ends, stop "
            f"it, or set another config.run_dir"
        )


def acquire(path: Path, progress: Progress) -> int:
    """The descriptor of the lock file, with the kernel's lock if the file system has locks."""
    start = time.monotonic()
    fd, first = try_lock(path)
    if fd is None:
        text = f"{path} is of {first.holder}; waiting up to {STALE_S:.0f} s for its heartbeat"
        with progress.waiting(text):
            while fd is None:
                time.sleep(POLL_S)
                fd, now = try_lock(path, silent_s=time.monotonic() - start)
                if fd is None and now != first:
                    raise now.in_use(path)
    if first.holder is not None:
        progress.status(f"took over the run folder from {first.holder}, which has ended")
    return fd


def try_lock(path: Path, *, silent_s: float = 0.0) -> tuple[int | None, Seen]:
    """(descriptor, what the file held), or None instead if another machine may hold the lock.

    `silent_s` is how long the lock was watched without a heartbeat. It decides if the clocks of the
    disk and of the other machine differ; a last heartbeat can be in the future.

    Raises FolderLockError if a process of this machine holds it, or one that does not respond.
    """
    fd, has_flock = open_locked(path)
    seen = read_lock(path)
    is_here = seen.holder is not None and seen.holder.machine == machine()
    if fd is not None and (seen.holder is None or (is_here and has_flock)):
        return fd, seen
    is_stale = max(silent_s, disk_time(path.parent) - seen.beat) >= STALE_S
    if fd is not None and is_stale:
        return fd, seen
    if fd is None and (is_here or is_stale or seen.holder is None):
        raise seen.in_use(path)
    if fd is not None:
        os.close(fd)
    return None, seen


def open_locked(path: Path) -> tuple[int | None, bool]:
    """(descriptor of the file, whether it has the kernel's lock); None if another process has it.

    Creates the file.
    """
    while True:
        fd, has_flock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                has_flock = False
            elif error.errno in NO_FLOCK:
                return fd, False
            else:
                os.close(fd)
                raise
        if is_file_at(fd, path):  # else the holder removed it in the meantime
            if has_flock:
                return fd, True
            os.close(fd)
            return None, False
        os.close(fd)


def is_file_at(fd: int, path: Path) -> bool:
    """Whether `path` is the open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def read_lock(path: Path) -> Seen:
    """Who holds the lock. Opening the file makes NFS ask the server for its current state."""
    try:
        with open(path, "rb") as file:
            text, beat = file.read(MAX_BYTES), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return Seen(None, 0.0)
    if not text:
        return Seen(None, beat)
    try:
        return Seen(Holder(**parse_json(text)), beat)
    except (ValueError, TypeError):
        return Seen(UNKNOWN, beat)


def this_process() -> Holder:
    """A holder with a new token."""
    return Holder(
        host=socket.gethostname(),
        machine=machine(),
        pid=os.getpid(),
        since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        command=shlex.join(sys.orig_argv)[:300],
        token=uuid.uuid4().hex,
    )


def machine() -> str:
    """Identifies this boot of this machine, also in containers; the host name without /proc."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()


def disk_time(folder: Path) -> float:
    """The time on the clock that the folder's disk gives to files, which may be a server's."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
