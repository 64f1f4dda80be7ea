"""Tests of jaxrl/ending.py in a small program; tests/trainer/test_signals.py has whole runs."""

import os
import signal
import subprocess
import sys

import pytest

START = """
import hashlib, os, signal, sys, time
from pathlib import Path
from jaxrl.ending import before_ending, default_on_signals, end_on_signals
end_on_signals()
lock = Path(sys.argv[1])
lock.touch()
"""
NATIVE = """
with before_ending(lock.unlink):
    print("buffered", end="")
    os.write(1, b"ready\\n")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # native code that sees no signal
"""
PYTHON = """
with before_ending(lock.unlink):
    print("buffered", end="")
    os.write(1, b"ready\\n")
    try:
        while True:
            pass
    finally:
        print("the main thread continues")
"""


@pytest.fixture
def start(tmp_path):
    """Starts a program and waits until it is ready; kills what a failed test leaves."""
    started = []

    def start(program: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", START + program, str(tmp_path / "lock")],
            env=os.environ | {"PYTHONUNBUFFERED": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("program", [NATIVE, PYTHON], ids=["native", "python"])
@pytest.mark.parametrize("name, status", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_gives_one_line_and_cleans_up(start, program, name, status, tmp_path):
    process = start(program)
    process.send_signal(signal.Signals[name])
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert errors == f"{name}: stopped at once; the files written before are intact\n"
    assert output == "buffered"
    assert not (tmp_path / "lock").exists()


def test_a_cleanup_that_hangs_or_fails_does_not_hold_up_the_end(start):
    program = """
import jaxrl.ending
jaxrl.ending.CLEANUP_S = 0.2
with before_ending(lambda: time.sleep(1e6)), before_ending(lambda: 1 / 0):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    process = start(program)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and errors.count("\n") == 1


def test_another_handler_takes_its_signals(start):
    program = """
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
print("ready", flush=True)
while not got:
    time.sleep(0.01)
print("its own handler")
"""
    process = start(program)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("its own handler\n", "")
    assert process.returncode == 0


def test_the_default_handlers_can_be_restored(start):
    program = """
default_on_signals()
try:
    print("ready", flush=True)
    time.sleep(1e6)
except KeyboardInterrupt:
    print("interrupted")
"""
    process = start(program)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("interrupted\n", "")


def test_during_steps_the_first_signal_sets_the_flag_and_the_second_ends(start, tmp_path):
    program = """
from jaxrl.runtime.signals import StopFlag, stop_on_signals
stop = StopFlag()
with stop_on_signals(stop), before_ending(lock.unlink):
    print("ready", flush=True)
    while not stop.signal:
        time.sleep(0.01)
    print(stop.signal, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # a save that takes long
"""
    process = start(program)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "SIGINT\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    first, second = errors.strip().split("\n")
    assert process.returncode == 130
    assert first.startswith("SIGINT: the run stops as soon as it can save")
    assert second.startswith("SIGINT: stopped at once")
    assert not (tmp_path / "lock").exists()


def test_an_unfinished_folder_is_removed_and_the_model_in_its_place_stays(start, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    program = """
from jaxrl.models.files.atomic_folder import atomic_folder
with atomic_folder(lock.parent / "model") as folder:
    (folder / "config.json").write_text("half")
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    process = start(program)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert (target / "config.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "model"]
