"""Tests of jaxrl/subprocesses/descendants.py, and of its use by reward workers."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.pool import RewardPool
from jaxrl.subprocesses.descendants import (
    adopting_orphans,
    descendants,
    end_descendants,
)
from tests.rewards.test_pool import is_alive, rollout

# A reward that starts a process in another session, which its parent does not wait for.
STARTS = """
import os, subprocess, sys, time

def start(data_source, solution_str, ground_truth, extra_info):
    command = "import os, subprocess\\n"
    command += "p = subprocess.Popen(['sleep', '600'], start_new_session=True)\\n"
    command += f"open({ground_truth!r}, 'w').write(str(p.pid) + chr(10)); os._exit(0)"
    env = {} if "without environment" in solution_str else None
    subprocess.run([sys.executable, "-c", command], env=env, start_new_session=True)
    if "hangs" in solution_str:
        time.sleep(600)
    if "crashes" in solution_str:
        os._exit(3)
    return 1.0
"""
WAIT_S = 60.0


def read_pid(path):
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            if (text := path.read_text()).endswith("\n"):
                return int(text)
        time.sleep(0.01)
    raise TimeoutError(path)


def has_ended(pid):
    end = time.monotonic() + WAIT_S
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_alive(pid)


@pytest.fixture
def function(tmp_path):
    (tmp_path / "starts.py").write_text(STARTS)
    return f"{tmp_path / 'starts.py'}:start"


@pytest.mark.thorough
def test_processes_in_other_sessions_end_with_their_worker(function, tmp_path):
    kinds = ["crashes", "hangs", "hangs without environment", "ends", "ends without environment"]
    paths = [tmp_path / kind for kind in kinds]
    with RewardPool(RewardConfig(functions=(function,), workers=1, timeout_s=5.0)) as pool:
        scored = pool.score([rollout(k, answer=str(p)) for k, p in zip(kinds, paths, strict=True)])
        assert [bool(reward.error) for reward in scored] == [True] * 3 + [False] * 2
        pids = list(map(read_pid, paths))
        assert [is_alive(pid) for pid in pids] == [False] * 3 + [True] * 2
    assert not any(map(is_alive, pids))


def test_processes_in_other_sessions_end_when_the_trainer_does(function, tmp_path):
    path = tmp_path / "pid"
    with RewardPool(RewardConfig(functions=(function,), workers=1)) as pool:
        pool.score([rollout("ends", answer=str(path))])
        pid = read_pid(path)
        assert is_alive(pid)
        for worker in pool._runner._workers:
            worker.process.channel.close()  # as the end of the trainer does
        assert has_ended(pid)


def test_descendants_are_found_until_they_have_ended():
    with adopting_orphans():
        child = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True)
        end = time.monotonic() + WAIT_S
        while len(descendants(child.pid)) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        found = descendants(child.pid)
        assert len(found) == 2 and child.pid not in found
        assert {child.pid, *found} <= {*descendants(os.getpid())}
        end_descendants(child.pid)
        assert not descendants(child.pid) and not any(map(is_alive, found))
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-child.pid, 0):
                pass


REAPS = """
import os
from jaxrl.subprocesses import descendants
descendants.MAX_ENDED = 2
for n, left in ((2, 2), (3, 0)):
    children = [os.posix_spawn("/bin/true", ["true"], {}) for _ in range(n)]
    for pid in children:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    descendants.reap_orphans()
    assert sum(os.path.exists(f"/proc/{pid}") for pid in children) == left
    for pid in children[:left]:
        os.waitpid(pid, 0)
"""


def test_ended_orphans_are_reaped_once_there_are_many():
    subprocess.run([sys.executable, "-c", REAPS], check=True)
