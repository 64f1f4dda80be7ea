"""Starts the Python processes in which foreign code runs, rewards and environments, apart from the run."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection

_ENV = {
    # foreign code must not take the accelerator or the cores that the run uses
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


def start_process(module: str) -> tuple[Connection, subprocess.Popen]:
    """`python -m module FD`, and the other end of the socket FD. It leads a session of its own, so that Ctrl-C
    reaches the parent alone."""
    ours, theirs = multiprocessing.Pipe()
    # -P: it sees exactly the parent's import path, with no entry for its own folder
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(theirs.fileno())],
        env=os.environ | _ENV | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return ours, process
