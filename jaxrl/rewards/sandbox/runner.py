"""Runs untrusted Python programs, each in confined processes (rewards/sandbox/process.py)."""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jaxrl.rewards.sandbox import jail, process
from jaxrl.rewards.sandbox.folder import temporary_folder
from jaxrl.rewards.sandbox.remote import NotPlainData

_MIB = 1 << 20
_START_S = 1.0  # interpreter startup, in addition to the program's time
# Not inherited. Threads of numerical libraries would take address space and cores.
_ENV = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_ENV |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_ROOT = str(Path(__file__).parents[3])  # the folder of the package jaxrl
# The package of this process, without its folder on the program's import path
_MAIN = f"import sys; sys.path.insert(0, {_ROOT!r}); import jaxrl; sys.path.pop(0); "
_MAIN += f"from {process.__name__} import main; main(*map(int, sys.argv[1:]))"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Resource limits of one program."""

    wall_s: float = 4.0  # also the CPU time, rounded up
    memory_mib: int = 1024  # address space
    file_mib: int = 16  # size of each file that it writes
    output_mib: int = 4  # standard output


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended, and its output."""

    # "ok", "wrong" (an assert failed), "error" (exception, exit status or limit), "timeout",
    # "output" (too much)
    end: str
    output: str = ""  # standard output; for a call what the process gave as JSON of its result


def run(
    program: str,
    *,
    stdin: str = "",
    test: str | None = None,
    call: dict[str, Any] | None = None,
    limits: Limits,
    unsafe: bool = False,
) -> Outcome:
    """Runs a program, then `test` on its names or one `call` of its functions.

    `call` is {"name", "arguments"}: a function of the program or a method of its class Solution.
    A test runs in a separate process. It can use the names of the program, and `_program`, its
    module; what it calls there returns plain data (rewards/sandbox/remote.py).

    Raises OSError if this machine cannot confine a process (without `unsafe`, if it has no
    Landlock), and NotPlainData if the test passes an object to the program that is not plain data.
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
        job = {"program": program, "call": call, "limits": limited, "parent": os.getpid()}
        job["test_folder"] = str(folder / "test")
        texts = [json.dumps(job)] + ([] if test is None else [test])
        outcome = _run(folder / "work", stdin, texts, limits)
    if test is None or outcome.end != "ok":
        return outcome
    result = json.loads(outcome.output or '{"end": "error"}')
    if result["end"] == "unsupported":
        raise NotPlainData(result["reason"])
    return Outcome(result["end"])


def _run(folder: Path, stdin: str, texts: list[str], limits: Limits) -> Outcome:
    """Starts process.py with a descriptor for each text and waits for the end of its processes."""
    jail.adopt_orphans()
    files = [_memory_file(text) for text in (stdin, *texts)]
    deadline = time.monotonic() + _START_S + limits.wall_s
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", "-X", "utf8", "-c", _MAIN, *map(str, files[1:])],
        cwd=folder,
        env=_ENV | {"HOME": str(folder), "TMPDIR": str(folder)},
        stdin=files[0],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=files[1:],
        process_group=0,
    )
    has_test = len(texts) > 1
    try:
        for fd in files:
            os.close(fd)
        outcome = _read(child, deadline, limits)
        if outcome.end == "ok" and not has_test:  # after a test, the program has nothing to do
            try:
                child.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                outcome = Outcome("timeout")
    finally:
        statuses = _end(child)
    if outcome.end == "ok" and -signal.SIGXCPU in statuses:
        return Outcome("timeout")
    if outcome.end == "ok" and not has_test and any(statuses):
        return Outcome("error", outcome.output)
    return outcome


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


def _read(child: subprocess.Popen, deadline: float, limits: Limits) -> Outcome:
    """Reads the output until its end, within the limits of time and size."""
    assert child.stdout is not None
    parts: list[bytes] = []
    left = limits.output_mib * _MIB
    with child.stdout, selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while True:
            if not ready.select(timeout=max(0.0, deadline - time.monotonic())):
                return Outcome("timeout")
            part = os.read(child.stdout.fileno(), 1 << 16)
            if not part:
                return Outcome("ok", b"".join(parts).decode(errors="replace"))
            parts.append(part)
            left -= len(part)
            if left < 0:
                return Outcome("output")
