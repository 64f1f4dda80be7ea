"""Worker processes: user code (rewards, environments) runs outside the training process.

`WorkerProcess` is for the parent. `connect` and `time_limit` are for the worker.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

from jaxrl.subprocesses.channel import Channel, WorkerChannel
from jaxrl.subprocesses.descendants import end_descendants
from jaxrl.subprocesses.output import OutputLog

START_TIMEOUT_S = 120.0  # covers the imports of the user's code
MAX_START_FAILURES = 3  # in a row
_REAP_S = 1.0  # a process that closed its socket usually ends within this time
_GRACE_S = 5.0  # added in the worker: the parent's limit fires first, unless the parent is gone
_MARK = "JAXRL_WORKER"  # in the environment of a worker and of what it starts
_ENV = {
    # user code must not take the accelerator or the cores that the run uses
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
# Runs a module as "python -m" does, with the parent's import path. PYTHONPATH would set it for the
# programs that user code starts, too, whose Python may be another one.
_MAIN = """\
import json, runpy, sys
sys.path[:] = json.loads(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class WorkerFailed(Exception):
    """A worker died, hangs or broke the protocol; the message is the reason. It is replaced."""


def import_path() -> list[str]:
    """This process's import path, for another process: without "", which is its working folder."""
    return [entry or os.getcwd() for entry in sys.path]


class WorkerProcess:
    """A process that runs `python -m module FD`, and the trainer's end of its socket FD.

    It has this process's import path and environment variables. What it starts inherits these, with
    the values of _ENV, and no other PYTHONPATH than the user's.
    It leads its own session, so Ctrl-C reaches the parent only and it has no terminal. `output`
    shows what it prints. With `ends_descendants`, all that it starts ends with it, in other
    sessions too; the module has to adopt orphans (subprocesses/descendants.py). The constructor
    raises WorkerFailed if the system starts no process.
    """

    def __init__(
        self, module: str, name: str, output: OutputLog, *, ends_descendants: bool = False
    ):
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._mark, self._ends_descendants = uuid.uuid4().hex, ends_descendants
        with theirs:
            try:
                command = [sys.executable, "-P", "-c", _MAIN, json.dumps(import_path()), module]
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    env=os.environ | _ENV | {_MARK: self._mark},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                self.channel.close()
                raise WorkerFailed(f"the process cannot be started: {error}") from error
        assert self.process.stdout is not None  # it is a pipe
        try:
            output.follow(self.process.stdout, name)
        except RuntimeError as error:  # no further thread
            self.kill()
            raise WorkerFailed(f"the output cannot be read: {error}") from error

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended. A process that it started may still hold its socket."""
        if self.process.returncode is not None:
            return True
        # WNOWAIT: the process id, which is also its group's, is not reused before kill()
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def kill(self) -> int:
        """Kills the process and its children; returns its exit status."""
        if self.process.returncode is None:
            self.channel.close()
            if self._ends_descendants:
                self._end_descendants()
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a process group
        return self.process.wait()

    def _end_descendants(self) -> None:
        """Kills what the process has started."""
        if self.ended:  # they have other parents now, but the environment of the process
            end_descendants(self.process.pid, f"{_MARK}={self._mark}")
            return
        os.kill(self.process.pid, signal.SIGSTOP)  # it starts no more, and keeps adopting orphans
        end_descendants(self.process.pid)

    def reap(self) -> int:
        """kill() for a process that closed its socket: waits briefly for its real exit status."""
        deadline = time.monotonic() + _REAP_S
        while not self.ended and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.kill()


def connect(fd: int) -> WorkerChannel:
    """The worker's end of the socket. Also ignores Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore
    return WorkerChannel(socket.socket(fileno=fd))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends this process if the block takes longer than `seconds` plus a grace period."""
    # SIGALRM's default action ends the process even inside C code
    signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
