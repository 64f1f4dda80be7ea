"""Tests of jaxrl/environments: pool.py, worker.py, messages.py and api.py."""

import contextlib
import dataclasses
import os
import random
import signal
import time
from pathlib import Path

import pytest

from jaxrl.config.keys import EnvConfig
from jaxrl.environments.api import Turn
from jaxrl.environments.messages import read_turn, write_turn
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.subprocesses.channel import ProtocolError

HAZARDS = """
import json
import os
import pickle
import stat
import struct
import subprocess
import sys
import time


def _frame(data):
    return struct.pack(">Q", len(data)) + data


TURN = {"messages": [], "reward": 1.0, "done": True, "counts": {}, "error": "", "rewarded": True}
TURN |= {"tools": [], "images": []}
GARBAGE = {
    "write text": b"hello, trainer",
    "write a pickle": _frame(pickle.dumps([1])),
    "write a list": _frame(b"[1]"),
    "write a reward": _frame(json.dumps(TURN | {"reward": float("inf")}).encode()),
    "write messages": _frame(json.dumps(TURN | {"messages": ["text"]}).encode()),
}


class Obey:
    def __init__(self, *, first="hello"):
        self.first, self.n = first, 0

    def reset(self, prompt):
        if prompt["answer"] == "raise":
            raise KeyError("x")
        if prompt["answer"] == "hang":
            time.sleep(1000)
        return {"default": None, "text": "go", "wrong": 5}.get(
            prompt["answer"], [{"role": "system", "content": self.first}]
        )

    def step(self, completion):
        self.n += 1
        if completion == "raise":
            raise RuntimeError("out of cheese")
        if completion == "exit":
            os._exit(3)
        if completion == "sys.exit":
            sys.exit("bye")
        if completion == "hang in C":
            9 ** 9 ** 9
        if completion in GARBAGE:
            fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
            for fd in fds:
                if fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, GARBAGE[completion])
        if completion == "print":
            print("\x1b[1mthinking")
        if completion == "surrogate":
            return chr(0xDCFF), 0.0, False
        if completion == "long":
            return "x" * (17 << 20), 0.0, False
        if completion == "spawn":
            child = subprocess.Popen(["sleep", "1000"])
            return f"{os.getpid()} {child.pid}", 0.0, False
        if completion == "jax":
            return str("jax" in sys.modules), 0.0, False
        return {
            "nan": ("x", float("nan"), False),
            "reward": ("x", "good", False),
            "done": ("x", 1.0, 1),
            "observation": (5, 1.0, False),
            "counts": ("x", 1.0, False, {"calls": float("inf")}),
            "two": ("x", 1.0),
        }.get(completion, (f"{completion} {self.n}", 0.5, completion == "end", {"calls": 1}))
"""
FAILURES = {
    "raise": "RuntimeError: out of cheese",
    "exit": "process died",
    "sys.exit": "SystemExit: bye",
    "hang in C": "no answer within 1 s",
    "nan": "step returned nan; return a finite number",
    "reward": "reward 'good'",
    "done": "done=1",
    "observation": "TypeError: step returned 5",
    "counts": "counts {'calls': inf}",
    "two": "return (observation, reward, done)",
    "long": "16777216 are allowed; return less",
    "write text": "user code wrote to the environment's socket: b'hello, trainer",
    "write a pickle": "is not JSON",
    "write a list": "[1] is no turn",
    "write a reward": "Infinity is no number of JSON",
    "write messages": "'text' is no message",
}


@pytest.fixture(scope="module")
def hazards(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "hazards.py"
    path.write_text(HAZARDS)
    return str(path)


@pytest.fixture
def pool(hazards):
    with EnvironmentPool(
        EnvConfig(name=f"{hazards}:Obey?first=yo", timeout_s=60.0, workers=32)
    ) as pool:
        yield pool


def prompt(answer=""):
    return {"messages": [], "answer": answer, "source": "s", "extra": {}, "seed": 7}


def limit_time(pool, seconds):
    """Limits resets and steps from now on; all others have a limit that no load exceeds."""
    pool._limits = dataclasses.replace(pool._limits, timeout_s=seconds)


def results(pool, n):
    """{episode: Turn} of the next `n` results."""
    found, deadline = {}, time.monotonic() + 60
    while len(found) < n and time.monotonic() < deadline:
        found |= dict(pool.collect(0.1))
    assert len(found) == n
    return found


def start_episodes(pool, n):
    episodes = [pool.start(prompt()) for _ in range(n)]
    first = results(pool, n)
    assert all(turn == Turn([{"role": "system", "content": "yo"}]) for turn in first.values())
    return episodes


def test_episodes_have_separate_state(pool):
    a, b = start_episodes(pool, 2)
    for text, turns in (("go", 1), ("on", 2)):
        pool.step(a, text)
        assert results(pool, 1)[a] == Turn(
            [{"role": "user", "content": f"{text} {turns}"}], 0.5, False, {"calls": 1.0}
        )
    pool.step(b, "end")
    assert results(pool, 1)[b] == Turn([], 0.5, True, {"calls": 1.0})


def test_a_failure_ends_only_its_episode(pool):
    episodes = dict(zip(start_episodes(pool, len(FAILURES) + 1), [*FAILURES, "fine"], strict=True))
    hanging = [number for number, text in episodes.items() if text == "hang in C"]
    for number in episodes.keys() - hanging:
        pool.step(number, episodes[number])
    turns = results(pool, len(episodes) - 1)
    limit_time(pool, 1.0)
    pool.step(*hanging, "hang in C")
    for number, turn in (turns | results(pool, 1)).items():
        text = episodes[number]
        if text == "fine":
            assert turn.messages == [{"role": "user", "content": "fine 1"}] and not turn.error
        else:
            assert FAILURES[text] in turn.error
    assert pool.n_free == 32 - 1


def test_failures_in_reset_end_the_episode(pool):
    episodes = {pool.start(prompt(text)): text for text in ("raise", "default", "text", "wrong")}
    turns = results(pool, 4)
    limit_time(pool, 1.0)
    episodes[pool.start(prompt("hang"))] = "hang"
    found = {episodes[number]: turn for number, turn in (turns | results(pool, 1)).items()}
    assert "KeyError" in found["raise"].error and "within 1 s" in found["hang"].error
    assert found["default"] == Turn(None)
    assert found["text"].messages == [{"role": "user", "content": "go"}]
    assert "reset returned 5" in found["wrong"].error


def test_an_ended_episode_leaves_no_process_and_episodes_do_not_import_jax(pool):
    (number,) = start_episodes(pool, 1)
    pool.step(number, "jax")
    assert results(pool, 1)[number].messages[0]["content"] == "False"
    pool.step(number, "spawn")
    pids = [int(pid) for pid in results(pool, 1)[number].messages[0]["content"].split()]
    assert all(map(is_alive, pids))
    pool.end(number)
    wait_until_gone(pids)
    start_episodes(pool, 1)  # the pool still works


def test_a_killed_fork_server_is_replaced(pool):
    (old,) = start_episodes(pool, 1)
    pool._server.process.kill()
    pool._server.process.wait()
    (new,) = start_episodes(pool, 1)
    pool.end(old)
    pool.step(new, "go")
    assert results(pool, 1)[new].messages


def test_a_fork_server_that_stops_is_replaced(pool, monkeypatch):
    monkeypatch.setattr("jaxrl.environments.pool._FORK_TIMEOUT_S", 0.5)
    os.kill(pool._server.pid, signal.SIGSTOP)
    (number,) = start_episodes(pool, 1)
    pool.step(number, "go")
    assert results(pool, 1)[number].messages


def test_a_fork_server_that_cannot_be_started_again_is_an_error_with_advice(tmp_path):
    path = tmp_path / "changing.py"
    path.write_text("class Env:\n    def reset(self, prompt): ...\n")
    with EnvironmentPool(EnvConfig(name=f"{path}:Env")) as pool:
        path.write_text("raise ImportError('has changed')")
        pool._server.process.kill()
        with pytest.raises(ChildProcessError, match=r"3 times in a row .*has changed.* resume"):
            pool.start(prompt())


@pytest.mark.parametrize("n_kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_random_moments_end_only_their_episodes(hazards, n_kills):
    """Kills episodes that run, that wait for the model, and the fork server."""
    generator = random.Random(0)
    n_killed, n_failed, killed = 0, 0, set()
    with EnvironmentPool(EnvConfig(name=f"{hazards}:Obey?first=yo", workers=8)) as pool:
        turns = {}  # episode: turns done
        while n_killed < n_kills:
            while pool.n_free:
                turns[pool.start(prompt())] = 0
            victim = generator.choice([*turns, 0]) if generator.random() < 0.3 else None
            if victim is not None and victim not in killed:
                pid = pool._episodes[victim].pid if victim else pool._server.pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed |= {victim} - {0}
                n_killed += 1
            for number, turn in pool.collect(1.0):
                if turn.error:
                    assert number in killed and turn.error == "the environment's process died"
                    n_failed += 1
                    del turns[number]
                    continue
                if turns[number]:
                    assert turn.messages == [{"role": "user", "content": f"go {turns[number]}"}]
                turns[number] += 1
                pool.step(number, "go")
    assert n_failed <= n_kills
    print(f"{n_kills} kills, {n_failed} episodes failed")


def test_output_is_shown_with_its_origin(hazards):
    lines = []
    config = EnvConfig(name=f"{hazards}:Obey?first=yo")
    with EnvironmentPool(config, write=lines.append) as pool:
        (number,) = start_episodes(pool, 1)
        pool.step(number, "print")
        assert results(pool, 1)[number].messages
    wait_until(lambda: lines)
    assert lines == ["environment: thinking"]


def test_text_that_utf_8_cannot_express_is_replaced(pool):
    (number,) = start_episodes(pool, 1)
    pool.step(number, "surrogate")
    assert results(pool, 1)[number].messages == [{"role": "user", "content": "?"}]


def test_turns_are_validated():
    turn = Turn([{"role": "user", "content": "é"}], 1.0, False, {"calls": 1.0})
    assert read_turn(write_turn(turn)) == turn
    for change in (
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"messages": "text"},
        {"reward": 1},
        {"reward": float("nan")},
        {"done": 1},
        {"counts": {"calls": "x"}},
        {"counts": {"calls": float("inf")}},
        {"counts": []},
        {"error": None},
    ):
        with pytest.raises(ProtocolError):
            read_turn(write_turn(turn) | change)
    for value in (None, [], "text", {}):
        with pytest.raises(ProtocolError):
            read_turn(value)


def test_close_ends_every_process(hazards):
    with EnvironmentPool(EnvConfig(name=f"{hazards}:Obey?first=yo")) as pool:
        (number,) = start_episodes(pool, 1)
        pool.step(number, "spawn")
        pids = [int(pid) for pid in results(pool, 1)[number].messages[0]["content"].split()]
        pids.append(pool._server.pid)
    wait_until_gone(pids)


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ended before the open, or before the read
        return False


def wait_until_gone(pids):
    wait_until(lambda: not any(map(is_alive, pids)))


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_import_and_option_errors_are_raised_at_startup(hazards, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos._exit(4)")
    for name, words in {
        "calculate": r"env\.name has the unknown name 'calculate'; set it to one of calculator",
        f"{hazards}:Obeys": "has no function or class 'Obeys'; set one that it has: Obey",
        "nowhere.module:Env": r"cannot be imported \(ModuleNotFoundError",
        f"{broken}:Env": "the process that imports it ended with status 4",
        "calculator?call=1": r"cannot be created \(TypeError.*'call'.*change its options",
    }.items():
        with pytest.raises(ValueError, match=words):
            EnvironmentPool(EnvConfig(name=name))
