"""Runs untrusted Python programs, each in confined processes (rewards/sandbox/process.py)."""

import contextlib
import dataclasses
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from jaxrl.rewards.sandbox import jail, process
from jaxrl.rewards.sandbox.folder import is_larger, temporary_folder
from jaxrl.rewards.sandbox.plain_data import PlainData, encode
from jaxrl.rewards.sandbox.remote import NotPlainData
from jaxrl.subprocesses.descendants import adopting_orphans

_MIB = 1 << 20
_START_S = 20.0  # until the process is confined, in addition to the program's time
_CHECK_S = 0.1  # between looks at the files of a program
# Not inherited. Threads of numerical libraries would take address space and cores.
_ENV = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_ENV |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_INHERITED = ("LD_LIBRARY_PATH",)  # some installations of Python do not start without
_ROOT = str(Path(__file__).parents[3])  # the folder of the package jaxrl
# The package of this process, without its folder on the program's import path
_MAIN = f"import sys; sys.path.insert(0, {_ROOT!r}); import jaxrl; sys.path.pop(0); "
_MAIN += f"from {process.__name__} import main; main(*map(int, sys.argv[1:]))"


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one program."""

    wall_s: float = 4.0  # also the CPU time, rounded up
    end: float = math.inf  # when it must have ended in any case, on the monotonic clock
    memory_mib: int = 1024  # address space
    file_mib: int = 16  # size of each file that it writes
    n_files: int = 4096  # files and folders that it writes
    folder_mib: int = 256  # size of all files together
    output_mib: int = 4  # standard output


@dataclasses.dataclass(frozen=True)
class SandboxOutcome:
    """How a program ended, and its output."""

    # "ok", "wrong" (an assert failed), "error" (exception, exit status or limit), "timeout",
    # "output" (too much)
    end: str
    output: str = ""  # standard output; for a call the JSON of its result (plain_data.py)


class NotStarted(OSError):
    """The process was not confined in time."""


def run(
    program: str,
    *,
    stdin: str = "",
    test: str | None = None,
    call: tuple[Any, ...] | None = None,
    imports: bool = False,
    limits: SandboxLimits,
    unsafe: bool = False,
) -> SandboxOutcome:
    """Runs a program, then `test` on its names or one `call` of its functions.

    `call` is (name, argument, ...): a function of the program or a method of its class Solution.
    `imports` gives the program the names that judges import (rewards/sandbox/given_imports.py).
    A test runs in a separate process. It can use the names of the program, and `_program`, its
    module; what it calls there returns plain data (rewards/sandbox/remote.py).

    Raises OSError if this machine cannot confine a process (without `unsafe`, if it has no
    Landlock), of which NotStarted if it is too slow, and NotPlainData if the test passes an object
    to the program that is not plain data.
    """
    if reason := jail.problem() or (not unsafe and jail.weakness()):
        raise OSError(reason)
    limited = {
        "cpu_s": int(limits.wall_s) + 1,
        "memory_bytes": limits.memory_mib * _MIB,
        "file_bytes": limits.file_mib * _MIB,
        "unsafe": unsafe,
    }
    with temporary_folder("work", "test") as folder:
        job = {"program": program, "imports": imports, "limits": limited, "parent": os.getpid()}
        job["call"] = call and [encode(item, _reject) for item in call]
        job["test_folder"] = str(folder / "test")
        texts = [json.dumps(job)] + ([] if test is None else [test])
        outcome = _run(folder / "work", stdin, texts, limits)
    if test is None or outcome.end != "ok":
        return outcome
    result = json.loads(outcome.output or '{"end": "error"}')
    if result["end"] == "unsupported":
        raise NotPlainData(result["reason"])
    return SandboxOutcome(result["end"])


def _reject(value: object) -> PlainData:
    raise NotPlainData(f"a test passes a {type(value).__name__} to the program")


def _run(folder: Path, stdin: str, texts: list[str], limits: SandboxLimits) -> SandboxOutcome:
    """Starts process.py with a descriptor for each text and waits for the end of its processes."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    start_by = min(time.monotonic() + _START_S, limits.end)
    if time.monotonic() >= limits.end:
        raise NotStarted("no time is left for a program")
    files = [_memory_file(text) for text in (stdin, *texts)]
    has_test = len(texts) > 1
    with adopting_orphans():
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-B", "-X", "utf8", "-c", _MAIN, *map(str, files[1:])],
                cwd=folder,
                env=_ENV | inherited | {"HOME": str(folder), "TMPDIR": str(folder)},
                stdin=files[0],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=files[1:],
                process_group=0,
            )
        finally:
            for fd in files:
                os.close(fd)
        try:
            _wait_for_jail(child, 1 + has_test, start_by)
            watch = _Watch(folder.parent, limits)
            outcome = _read(child, watch)
            if outcome.end == "ok" and not has_test:  # after a test, the program has nothing to do
                outcome = _wait(child, watch) or outcome
        finally:
            for pipe in (child.stdout, child.stderr):
                assert pipe is not None
                pipe.close()
            statuses = _end(child)
    if outcome.end == "ok" and -signal.SIGXCPU in statuses:
        return SandboxOutcome("timeout")
    if outcome.end == "ok" and not has_test and any(statuses):
        return SandboxOutcome("error", outcome.output)
    return outcome


def _wait_for_jail(child: subprocess.Popen, n: int, end: float) -> None:
    """Waits until `n` processes are confined. Raises OSError if they are not."""
    text = b""
    assert child.stderr is not None
    while text.count(process.CONFINED) < n:
        part = _read_part(child.stderr, end)
        if part is None:
            raise NotStarted("a program could not be started in time; use fewer workers")
        if not part:
            lines = text.replace(process.CONFINED, b"").decode(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), "no message")
            raise OSError(f"the jail of a program cannot be set up: {reason[-300:]}")
        text += part


class _Watch:
    """The limits of a running program that the kernel does not know: time, and its files."""

    def __init__(self, folder: Path, limits: SandboxLimits):
        self._folder, self._limits = folder, limits
        self.output_bytes = limits.output_mib * _MIB
        self._deadline = min(time.monotonic() + limits.wall_s, limits.end)
        self._next = time.monotonic() + _CHECK_S

    @property
    def next(self) -> float:
        """When to look again, on the monotonic clock."""
        return min(self._next, self._deadline)

    def failure(self) -> str:
        """The limit that the program has exceeded, as an Outcome's end; "" if none."""
        now = time.monotonic()
        if now >= self._deadline:
            return "timeout"
        if now < self._next:
            return ""
        self._next = now + _CHECK_S
        n_bytes = self._limits.folder_mib * _MIB
        too_large = is_larger(self._folder, n_entries=self._limits.n_files, n_bytes=n_bytes)
        return "error" if too_large else ""


def _wait(child: subprocess.Popen, watch: _Watch) -> SandboxOutcome | None:
    """Waits for the end of a process; returns the outcome if it exceeds a limit."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, watch.next - time.monotonic()))
            return None
        if failure := watch.failure():
            return SandboxOutcome(failure)


def _end(child: subprocess.Popen) -> list[int]:
    """Kills the child and the process that it may have forked; returns their exit statuses."""
    if child.returncode is None:
        os.killpg(child.pid, signal.SIGKILL)  # none of them can leave this group
    statuses = [child.wait()]
    with contextlib.suppress(ChildProcessError):
        while True:
            _, status = os.waitpid(-child.pid, 0)
            statuses.append(os.waitstatus_to_exitcode(status))
    return statuses


def _memory_file(text: str) -> int:
    """A descriptor from which the text can be read; it has no name that a program could open."""
    fd = os.memfd_create("jaxrl-code")
    with os.fdopen(os.dup(fd), "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read(child: subprocess.Popen, watch: _Watch) -> SandboxOutcome:
    """Reads the output until its end, within the limits of time and size."""
    assert child.stdout is not None
    parts: list[bytes] = []
    left = watch.output_bytes
    while left >= 0:
        part = _read_part(child.stdout, watch.next)
        if failure := watch.failure():
            return SandboxOutcome(failure)
        if part == b"":
            return SandboxOutcome("ok", b"".join(parts).decode(errors="replace"))
        if part is not None:
            parts.append(part)
            left -= len(part)
    return SandboxOutcome("output")


def _read_part(file: IO[bytes], end: float) -> bytes | None:
    """The next bytes of a pipe, none at its end; None if there are none until `end`."""
    with selectors.DefaultSelector() as ready:
        ready.register(file, selectors.EVENT_READ)
        if not ready.select(timeout=max(0.0, end - time.monotonic())):
            return None
    return os.read(file.fileno(), 1 << 16)
