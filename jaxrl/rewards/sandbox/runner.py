"""Runs untrusted Python programs, each in a confined process (rewards/sandbox/jail.py)."""

import dataclasses
import json
import os
import platform
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxrl.rewards.sandbox import jail

_MIB = 1 << 20
_START_S = 1.0  # interpreter startup, in addition to the program's time
# Not inherited. Threads of numerical libraries would take address space and cores.
_ENV = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_ENV |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


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

    end: str  # "ok", "error" (exception, exit status or limit), "timeout", "output" (too much)
    output: str = ""  # standard output; for a call its result as JSON


def run(
    program: str,
    *,
    stdin: str = "",
    test: str | None = None,
    call: dict[str, Any] | None = None,
    limits: Limits,
) -> Outcome:
    """Runs a program, then `test` in its namespace or one `call` of its functions.

    `call` is {"name", "arguments"}: a function of the program or a method of its class Solution.
    A test has passed, and a call has returned, only if the process reports it with a secret that
    the program does not get. Raises OSError if this machine cannot confine a process.
    """
    if sys.platform != "linux" or platform.machine() not in jail.MACHINES:
        raise OSError(
            f"programs cannot be confined on {sys.platform} {platform.machine()}; use the code "
            f"reward on Linux with {' or '.join(jail.MACHINES)}"
        )
    secret = secrets.token_hex(16)
    job = {
        "program": program,
        "test": test,
        "call": call,
        "secret": secret,
        "limits": {
            "cpu_s": int(limits.wall_s) + 1,
            "memory_bytes": limits.memory_mib * _MIB,
            "file_bytes": limits.file_mib * _MIB,
        },
    }
    with tempfile.TemporaryDirectory(prefix="jaxrl-code-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "work").mkdir()
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "stdin").write_text(stdin)
        with open(folder / "stdin") as stdin_file:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-X", "utf8", jail.__file__, str(folder / "job.json")],
                cwd=folder / "work",
                env=_ENV | {"HOME": str(folder / "work"), "TMPDIR": str(folder / "work")},
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        try:
            outcome = _read(process, limits)
        finally:
            process.kill()  # it can have no children
            process.wait()
    if outcome.end != "ok" or (test is None and call is None):
        return outcome
    if not outcome.output.startswith(secret):  # it ended before the test did
        return Outcome("error")
    return Outcome("ok", outcome.output.removeprefix(secret))


def _read(process: subprocess.Popen, limits: Limits) -> Outcome:
    """Waits for the end of the process, within the limits of time and output."""
    assert process.stdout is not None
    deadline = time.monotonic() + _START_S + limits.wall_s
    parts: list[bytes] = []
    left = limits.output_mib * _MIB
    with process.stdout, selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not ready.select(timeout=max(0.0, deadline - time.monotonic())):
                return Outcome("timeout")
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                break
            parts.append(part)
            left -= len(part)
            if left < 0:
                return Outcome("output")
    try:
        status = process.wait(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Outcome("timeout")
    if status == -signal.SIGXCPU:
        return Outcome("timeout")
    text = b"".join(parts).decode(errors="replace")
    return Outcome("ok" if status == 0 else "error", text)
