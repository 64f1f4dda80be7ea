"""Tests of jaxrl/rewards/sandbox/runner.py, and of jail.py through it.

Escapes: tests/rewards/sandbox/test_hostile.py. Hostile programs with time and memory limits:
tests/rewards/verifiers/test_code.py.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid

import pytest

from jaxrl.rewards.sandbox import jail, landlock, runner
from jaxrl.rewards.sandbox.runner import Limits, run

pytestmark = pytest.mark.skipif(
    bool(jail.problem() or jail.weakness()), reason=jail.problem() or jail.weakness()
)


def output(program, **options):
    outcome = run(program, limits=Limits(**options))
    assert outcome.end == "ok", outcome
    return outcome.output.strip()


def test_environment_variables_are_not_inherited(monkeypatch):
    monkeypatch.setenv("API_KEY", "hunter2")
    assert "hunter2" not in output("import os; print(dict(os.environ))")


ORDINARY = """
import asyncio, collections, concurrent.futures, csv, datetime, decimal, fractions, heapq, itertools
import json, math, os, pathlib, random, re, shutil, signal, sqlite3, statistics, tempfile, threading
import time, uuid, zoneinfo
import numpy

async def answer():
    await asyncio.sleep(0.001)
    return 42

def rings():
    signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.1)
    return rung == [1]

rung = []
work = pathlib.Path("folder/inner")
work.mkdir(parents=True)
(work / "a").write_text("text")
(work / "a").rename("folder/b")
shutil.copyfile("folder/b", "folder/c")
with tempfile.TemporaryFile("w+") as file:
    file.write("x" * 100)
    file.truncate(3)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    squares = list(pool.map(lambda x: x * x, range(20)))
database = sqlite3.connect("data.db")
database.execute("create table t (x)")
print(all([
    asyncio.run(answer()) == 42, rings(), pathlib.Path("folder/c").read_text() == "text",
    squares[-1] == 361, int((numpy.ones((8, 8)) @ numpy.ones((8, 8))).sum()) == 512,
    0 <= random.random() < 1, uuid.uuid4() != uuid.uuid4(), os.cpu_count() > 0,
    datetime.datetime.now(zoneinfo.ZoneInfo("UTC")).year > 2000,
    shutil.get_terminal_size().columns > 0,
]))
shutil.rmtree("folder")
"""


def test_ordinary_programs_work():
    assert output(ORDINARY) == "True"


def test_the_number_of_threads_is_limited():
    program = """
import threading, time
threading.stack_size(32768)
n_started = 0
try:
    while n_started < 4000:
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        n_started += 1
finally:
    print(n_started, flush=True)
    os._exit(0)
"""
    with open("/proc/loadavg") as file:
        n_threads = int(file.read().split()[3].partition("/")[2])
    # where neither a separate user nor a user namespace is possible, others' threads count too
    assert 32 <= int(output("import os\n" + program)) <= 64 + 2 * n_threads


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a separate user")
def test_a_program_of_root_runs_as_a_user_without_capabilities_to_write():
    program = """
import os, threading, time
threading.stack_size(32768)
found = [os.getuid(), os.getgid(), os.getgroups()]
try:
    while True: threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
except RuntimeError:
    print(found, threading.active_count(), flush=True)
    os._exit(0)
"""
    users = {output(program) for _ in range(2)}
    assert len(users) == 2  # one for each program
    for user in users:
        (uid, gid, groups), n_threads = eval(user.replace("] ", "], "))
        assert uid == gid > 1 << 30 and groups == [] and n_threads <= 64


def test_without_landlock_no_program_runs_unless_it_is_marked_unsafe(monkeypatch):
    monkeypatch.setattr(landlock, "version", lambda: 0)
    with pytest.raises(OSError, match="has no Landlock"):
        run("print(1)", limits=Limits())
    assert run("print(1)", limits=Limits(), unsafe=True).output == "1\n"


def test_a_failed_assert_differs_from_an_exception():
    def end(test):
        return run("def f(): return 1", test=test, limits=Limits()).end

    assert [end("assert f() == 1"), end("assert f() == 2"), end("f() / 0")] == [
        "ok",
        "wrong",
        "error",
    ]


SLEEPS = "import time\ntime.sleep(100)\n"
HANGS = "def f():\n    while True: pass\n"


def processes_with(text):
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found += [path] * (text.encode() in path.read_bytes())
    return found


@pytest.fixture
def mark(monkeypatch):
    """A text in the command line of all sandbox processes of a test."""
    text = uuid.uuid4().hex
    monkeypatch.setattr(runner, "_MAIN", f"mark = {text!r}; {runner._MAIN}")
    return text


@pytest.mark.parametrize(
    "program, test",
    [(SLEEPS, None), (HANGS, "f()"), (SLEEPS, "f()")],
    ids=["a program sleeps", "a call hangs", "an import sleeps"],
)
def test_no_process_remains(mark, program, test):
    assert run(program, test=test, limits=Limits(wall_s=0.2)).end == "timeout"
    assert not processes_with(mark)


def test_the_processes_end_with_the_one_that_started_them(mark, tmp_path):
    script = (
        "from jaxrl.rewards.sandbox import runner\n"
        f"runner._MAIN = {runner._MAIN!r}\n"
        f"runner.run({HANGS!r}, test='f()', limits=runner.Limits(wall_s=100))"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}  # its folder remains
    starter = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, env=env)
    end = time.monotonic() + 30
    while len(processes_with(mark)) < 3 and time.monotonic() < end:  # starter, test, program
        time.sleep(0.05)
    assert len(processes_with(mark)) == 3
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    end = time.monotonic() + 10
    while processes_with(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert not processes_with(mark)
