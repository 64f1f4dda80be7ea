"""The processes that a process has started, in other sessions and process groups too.

A process that adopts orphans (PR_SET_CHILD_SUBREAPER) stays the ancestor of whatever its children
start, so that all of them can be found and ended with it.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
MAX_ENDED = 256  # children that have ended and wait for their status to be taken
_LIMIT_S = 2.0  # to end processes that start others meanwhile
_POLL_S = 0.005


def adopt_orphans(adopts: bool = True) -> None:
    """Makes this process the parent of processes that its children leave, or undoes that."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopts orphans within the block."""
    before = ctypes.c_int()
    _LIBC.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(bool(before.value))


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have; zombies are left out."""
    found, parents = list[int](), [pid]
    while parents:
        children = _children(parents.pop())
        parents += children
        found += [child for child in children if not _is_zombie(child)]
    return found


def marked(mark: str) -> list[int]:
    """Processes of this user whose environment has a text; it looks at all of the machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid() and not _is_zombie(pid)]


def end_descendants(pid: int, mark: str = "") -> None:
    """Kills the descendants of a process until none is left, and with `mark` marked processes."""
    end = time.monotonic() + _LIMIT_S
    while (found := {*descendants(pid), *(marked(mark) if mark else ())} - {pid}) and (
        time.monotonic() < end
    ):
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_S)


def reap_orphans() -> None:
    """Takes the statuses of children that have ended, once there are very many of them.

    A process that adopts orphans must, or they fill the system's table. There is no sign by which
    they differ from its own children, whose statuses belong to the code that started them.
    """
    ended = [pid for pid in _children(os.getpid()) if _is_zombie(pid)]
    for pid in ended if len(ended) > MAX_ENDED else ():
        with contextlib.suppress(ChildProcessError):  # just taken
            os.waitpid(pid, os.WNOHANG)


def _children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True
