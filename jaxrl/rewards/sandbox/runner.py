"""Runs Python that nobody trusts, each time in a process that is shut in (rewards/sandbox/jail.py)."""

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
_START_S = 1.0  # of the interpreter, beside the program's own time
# Nothing is inherited. Threads of numerical libraries would take address space and cores.
_ENV = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_ENV |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one program."""

    wall_s: float = 4.0  # of CPU as much, rounded up
    memory_mib: int = 1024  # of address space
    file_mib: int = 16  # of a file that it writes
    output_mib: int = 4  # of its standard output


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended, and what it said."""

    end: str  # "ok", "error" (an exception, an exit status, a limit), "timeout" or "output" (too much of it)
    output: str = ""  # standard output; after a call its result as JSON


def run(
    program: str,
    *,
    stdin: str = "",
    test: str | None = None,
    call: dict[str, Any] | None = None,
    limits: Limits,
) -> Outcome:
    """The program by itself; or, with `test`, that code after it in its namespace; or, with `call`
    ({"name", "arguments"}), one of its functions or of its class Solution.

    A test has passed, and a call has returned, only if the process says so by a secret that the program is
    not given. Raises OSError where this machine cannot shut a process in.
    """
    if sys.platform != "linux" or platform.machine() not in jail.MACHINES:
        raise OSError(
            f"programs cannot be shut in on {sys.platform} {platform.machine()}; use the code reward on Linux, "
            f"{' or '.join(jail.MACHINES)}"
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
        (folder / "own").mkdir()
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "stdin").write_text(stdin)
        with open(folder / "stdin") as given:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-X", "utf8", jail.__file__, str(folder / "job.json")],
                cwd=folder / "own",
                env=_ENV | {"HOME": str(folder / "own"), "TMPDIR": str(folder / "own")},
                stdin=given,
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
    """Waits for the end, at most as long and for as much output as the limits say."""
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
