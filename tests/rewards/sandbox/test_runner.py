"""Tests of jaxrl/rewards/sandbox/runner.py and jaxrl/rewards/sandbox/jail.py.

Hostile programs with time and memory limits: tests/rewards/verifiers/test_code.py.
"""

import os
import socket
import subprocess
import sys

import pytest

from jaxrl.rewards.sandbox import jail
from jaxrl.rewards.sandbox.runner import Limits, run

TRY = """
import os
def fails(action):
    try:
        action()
    except (OSError, ValueError):
        return True
"""


def prints_true(program):
    """Whether the program, run in the sandbox, prints True at its end."""
    outcome = run(TRY + program, limits=Limits(wall_s=3.0))
    assert outcome.end == "ok"
    return outcome.output.split()[-1] == "True"


def test_the_network_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        connect = f"import socket; print(fails(lambda: socket.create_connection({address!r})))"
        assert prints_true(connect)
        env = os.environ | {"PYTHONPATH": ""}
        free = subprocess.run(
            [sys.executable, "-c", TRY + connect], env=env, capture_output=True, text=True
        )
        assert free.stdout.strip() == "None"  # the same program connects outside the sandbox
    assert prints_true("import socket; print(fails(lambda: socket.socket(socket.AF_UNIX)))")


def test_other_processes_are_unreachable():
    assert prints_true("print(fails(lambda: os.kill(os.getppid(), 0)))")
    assert prints_true("import resource; print(fails(lambda: resource.prlimit(os.getppid(), 0)))")
    assert prints_true("print(fails(os.setsid))")
    assert prints_true("print(fails(lambda: os.execv('/bin/true', ['true'])))")


def test_limits_cannot_be_raised():
    raise_limit = "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    assert prints_true(f"import resource; print(fails(lambda: {raise_limit}))")


def test_environment_variables_are_not_inherited(monkeypatch):
    monkeypatch.setenv("API_KEY", "hunter2")
    outcome = run("import os; print(dict(os.environ))", limits=Limits())
    assert outcome.end == "ok" and "hunter2" not in outcome.output


@pytest.mark.skipif(jail.landlock_version() <= 0, reason="this kernel has no Landlock")
def test_files_outside_the_working_folder_are_unreachable(tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    assert prints_true(f"print(fails(lambda: open({str(tmp_path / 'secret')!r}).read()))")
    assert prints_true(f"print(fails(lambda: open({str(tmp_path / 'new')!r}, 'w')))")
    assert prints_true("print(fails(lambda: open(f'/proc/{os.getppid()}/environ').read()))")
    assert not (tmp_path / "new").exists()


def test_files_threads_and_numpy_work():
    program = """
import threading, numpy
open("file", "w").write("a"); text = open("file").read()
found = []
thread = threading.Thread(target=lambda: found.append(1)); thread.start(); thread.join()
print(text == "a" and found == [1] and int((numpy.ones((8, 8)) @ numpy.ones((8, 8))).sum()) == 512)
"""
    assert prints_true(program)
