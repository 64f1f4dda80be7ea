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
from jaxrl.rewards.sandbox.runner import SandboxLimits, run
from jaxrl.rewards.verifiers.code import check_machine

pytestmark = pytest.mark.skipif(
    bool(jail.problem() or jail.weakness()), reason=jail.problem() or jail.weakness()
)


def output(program, **options):
    outcome = run(program, limits=SandboxLimits(**options))
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
        run("print(1)", limits=SandboxLimits())
    assert run("print(1)", limits=SandboxLimits(), unsafe=True).output == "1\n"


@pytest.fixture
def slow_start(tmp_path, monkeypatch):
    """A Python that needs LD_LIBRARY_PATH, as some installations do."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nif [ -z "$LD_LIBRARY_PATH" ]; then\n'
        'echo "error while loading shared libraries: libpython3.so" >&2; exit 127; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(python))


def test_a_python_that_does_not_start_is_an_error_and_no_outcome(slow_start, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    for options in ({}, {"call": ("f",)}, {"test": "assert f()"}):
        with pytest.raises(OSError, match=r"cannot be set up: .* libpython3\.so"):
            run("def f(): return 1", limits=SandboxLimits(), **options)
    with pytest.raises(ValueError, match=r"cannot run programs on this machine: .* libpython3\.so"):
        check_machine()


def test_a_python_that_needs_a_library_path_gets_it(slow_start, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    check_machine()
    assert output("print(1)") == "1"


# System calls without which programs cannot be confined, or not be judged, on x86-64 and aarch64
NEEDED = {
    "seccomp": ((157, 167), 22),
    "landlock_create_ruleset": ((444, 444), None),
    "landlock_restrict_self": ((446, 446), None),
    "capset": ((126, 91), None),
    "memfd_create": ((319, 279), None),
    "prlimit64": ((302, 261), 0),
}
# Those that the jail can do without
OPTIONAL = {"unshare": ((272, 97), None), "setresuid": ((117, 147), None)}
DENY = """
import ctypes, os, struct, sys
from jaxrl.rewards.sandbox import check, jail, runner
from jaxrl.rewards.verifiers.code import check_machine

def deny(number, first):
    "Denies a system call, or those with this first argument, to this process and its children."
    lines = [(0x20, 0, 0, 0), (0x15, 0, 3, number), (0x20, 0, 0, 16), (0x15, 0, 1, first or 0)]
    lines = lines if first is not None else [(0x20, 0, 0, 0), (0x15, 0, 1, number)]
    lines += [(0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, header, 0, 0) == 0

for name, (numbers, first) in CALLS.items():
    sys.stdout.flush()
    if os.fork() == 0:
        deny(numbers[os.uname().machine != "x86_64"], first)
        try:
            check_machine()
            found = "works"
        except ValueError as error:
            found = "refused"
            try:
                found += str(runner.run("print(1)", limits=runner.SandboxLimits()))
            except OSError:
                pass
        print(name, found, flush=True)
        os._exit(0)
    os.wait()
"""


def found_when_denied(calls):
    script = f"CALLS = {calls!r}\n{DENY}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_a_jail_that_cannot_be_set_up_is_refused_at_the_start_and_never_scored():
    assert found_when_denied(NEEDED) == dict.fromkeys(NEEDED, "refused")


def test_what_the_jail_can_do_without_is_not_refused():
    assert found_when_denied(OPTIONAL) == dict.fromkeys(OPTIONAL, "works")


def test_a_program_ends_at_the_end_of_its_call_whatever_its_own_time():
    limits = SandboxLimits(wall_s=600.0, end=time.monotonic() + 2.0)
    assert run("import time; time.sleep(600)", limits=limits).end == "timeout"
    with pytest.raises(runner.NotStarted):
        run("print(1)", limits=SandboxLimits(end=time.monotonic()))


MANY = {
    "files": "while True: open(str(n), 'w').close(); n += 1",
    "nested folders": "while True: os.mkdir('d'); os.chdir('d')",
    "folders without names": "os.mkdir('d', 0o300); os.chdir('d')\n"
    "while True: os.mkdir(str(n)); n += 1",
    "bytes": "while True: open(str(n), 'wb').write(bytes(1 << 20)); n += 1",
    "after its output": "os.close(1)\nwhile True: os.mkdir(str(n)); n += 1",
}


@pytest.mark.parametrize("program", MANY.values(), ids=MANY)
def test_the_files_of_a_program_are_limited(program):
    limits = SandboxLimits(wall_s=60.0, n_files=500, folder_mib=8)
    assert run(f"import os\nn = 0\n{program}", limits=limits).end == "error"


def test_a_failed_assert_differs_from_an_exception():
    def end(test):
        return run("def f(): return 1", test=test, limits=SandboxLimits()).end

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
    assert run(program, test=test, limits=SandboxLimits(wall_s=0.2)).end == "timeout"
    assert not processes_with(mark)


def test_the_processes_end_with_the_one_that_started_them(mark, tmp_path):
    script = (
        "from jaxrl.rewards.sandbox import runner\n"
        f"runner._MAIN = {runner._MAIN!r}\n"
        f"runner.run({HANGS!r}, test='f()', limits=runner.SandboxLimits(wall_s=100))"
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
