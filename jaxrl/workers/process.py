"""Worker processes: user code (rewards, environments) runs outside the training process.

`start_process` is for the parent. `connect`, `time_limit` and `error_text` are for the worker.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

START_TIMEOUT_S = 120.0  # covers the imports of the user's code
_GRACE_S = 5.0  # added in the worker: the parent's limit fires first, unless the parent is gone
_MAX_ERROR_CHARS = 500
_ENV = {
    # user code must not take the accelerator or the cores that the run uses
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


def start_process(module: str) -> tuple[Connection, subprocess.Popen]:
    """Runs `python -m module FD`. Returns the parent's end of the socket FD, and the process.

    The process leads its own session, so Ctrl-C reaches the parent only.
    """
    parent_end, worker_end = multiprocessing.Pipe()
    # -P: the worker sees exactly the parent's import path, with no entry for its working folder
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(worker_end.fileno())],
        env=os.environ | _ENV | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        pass_fds=[worker_end.fileno()],
        start_new_session=True,
    )
    worker_end.close()
    return parent_end, process


def connect(fd: int) -> Connection:
    """The worker's end of the socket. Also ignores Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return Connection(fd)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends this process if the block takes longer than `seconds` plus a grace period."""
    # SIGALRM's default action ends the process even inside C code
    signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def error_text(error: BaseException) -> str:
    """Type and message of an exception, shortened for logs."""
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
