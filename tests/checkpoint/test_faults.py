"""Faults of disks and processes during a save: the last complete checkpoint is always restored.

They cover jaxrl/checkpoint/checkpointer.py.
"""

import concurrent.futures.thread
import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.config.keys import CheckpointConfig
from tests.checkpoint.test_checkpointer import assert_bitwise_equal, numbers

SHAPE = (64, 64)


@pytest.fixture
def checkpointer(tmp_path):
    opened = Checkpointer(tmp_path / "run" / "checkpoints", CheckpointConfig())
    opened.save(1, numbers(1, shape=SHAPE), {"step": 1})
    opened.wait()
    yield opened
    opened.close()


@pytest.fixture
def tmpfs(tmp_path):
    """mount(options) mounts a tmpfs and returns its folder."""
    mounted = []

    def mount(options: str) -> Path:
        folder = tmp_path / "tmpfs"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run(command, capture_output=True).returncode == 0:
                mounted.append(folder)
                return folder
        pytest.skip("mounting a tmpfs needs root")

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fails_and_leaves_step_1(checkpointer, match="") -> bool:
    """Saves step 2. If that fails, step 1 must be intact; returns whether it failed."""
    try:
        checkpointer.save(2, numbers(2, shape=SHAPE), {"step": 2})
        checkpointer.wait()
    except CheckpointError as error:
        assert "step 1 is intact" in str(error) or "no room" in str(error)
        assert match in str(error)
        assert checkpointer.all_steps() == [1]
        state, host = checkpointer.restore(numbers(0, shape=SHAPE))
        assert_bitwise_equal(state, numbers(1, shape=SHAPE))
        assert host == {"step": 1}
        return True
    return False


def assert_no_thread_is_left(before):
    """A thread that still waits would keep the process from ending."""
    deadline = time.monotonic() + 10
    for thread in set(threading.enumerate()) - set(before):
        in_pool = thread in concurrent.futures.thread._threads_queues  # ends at exit
        if not thread.daemon and not in_pool:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("name", ["2.orbax", "host.orbax", "state.orbax", "array_metadatas"])
def test_a_folder_that_cannot_be_made_fails_the_save_at_once(checkpointer, monkeypatch, name):
    threads, mkdir = threading.enumerate(), os.mkdir

    def full(path, *args, **kwargs):
        if name in os.path.basename(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", full)
    assert fails_and_leaves_step_1(checkpointer, match="No space left on device")
    assert_no_thread_is_left(threads)
    monkeypatch.undo()
    assert not fails_and_leaves_step_1(checkpointer)
    assert checkpointer.all_steps() == [1, 2]


def test_every_number_of_free_inodes_saves_or_fails_cleanly(tmpfs):
    folder, threads = tmpfs("size=64m,nr_inodes=150"), threading.enumerate()
    checkpointer = Checkpointer(folder / "checkpoints", CheckpointConfig())
    checkpointer.save(1, numbers(1, shape=SHAPE), {"step": 1})
    checkpointer.wait()
    (folder / "full").mkdir()

    def leave(n_free: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                (folder / "full" / str(time.monotonic_ns())).touch()
        for path in list((folder / "full").iterdir())[:n_free]:
            path.unlink()

    outcomes = []
    for n_free in range(40):
        leave(n_free)
        outcomes.append(fails_and_leaves_step_1(checkpointer))
        if not outcomes[-1]:
            break
    assert outcomes[0] and not outcomes[-1]
    assert_no_thread_is_left(threads)
    checkpointer.close()


def test_every_amount_of_free_space_saves_or_fails_cleanly(tmpfs, monkeypatch):
    folder, threads = tmpfs("size=1m"), threading.enumerate()
    checkpointer = Checkpointer(folder / "checkpoints", CheckpointConfig())
    checkpointer.save(1, numbers(1, shape=SHAPE), {"step": 1})
    checkpointer.wait()
    # 48 KiB of arrays: above that, the check before the save passes
    outcomes = []
    for n_free in range(0, 400, 16):
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        (folder / "full").write_bytes(bytes(max(0, free - n_free * 1024)))
        outcomes.append(fails_and_leaves_step_1(checkpointer))
        (folder / "full").unlink()
        if not outcomes[-1]:
            break
    assert outcomes[0] and sum(outcomes) > 3 and not outcomes[-1]
    assert_no_thread_is_left(threads)
    checkpointer.close()


def test_a_disk_that_became_read_only_is_one_message(tmpfs):
    folder = tmpfs("size=1m")
    checkpointer = Checkpointer(folder / "checkpoints", CheckpointConfig())
    checkpointer.save(1, numbers(1, shape=SHAPE), {"step": 1})
    checkpointer.wait()
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    assert fails_and_leaves_step_1(checkpointer, match="Read-only file system")
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    assert not fails_and_leaves_step_1(checkpointer)
    checkpointer.close()


def test_a_removed_run_folder_is_one_message(checkpointer):
    folder = checkpointer.directory.parent
    folder.rename(folder.with_name("moved"))
    with pytest.raises(CheckpointError, match=r"step 2 in .* failed: .*there is no earlier one"):
        checkpointer.save(2, numbers(2, shape=SHAPE), {"step": 2})
        checkpointer.wait()
    folder.with_name("moved").rename(folder)
    assert not fails_and_leaves_step_1(checkpointer)


SAVES = """
    import os, sys
    import jax, jax.numpy as jnp
    from jaxrl.config.keys import CheckpointConfig
    from jaxrl.checkpoint.checkpointer import Checkpointer
    from jaxrl.types import TrainState

    def numbers(step):
        arrays = [jnp.full((256, 256), step + i, jnp.float32) for i in range(24)]
        return TrainState({"w": arrays}, (), jnp.int32(step))

    def save_until_killed():
        jax.config.update("jax_platforms", "cpu")
        checkpointer = Checkpointer(sys.argv[1], CheckpointConfig(keep=2))
        first = (checkpointer.latest_step() or 0) + 1
        for step in range(first, first + 10_000):
            checkpointer.save(step, numbers(step), {"step": step})
            checkpointer.wait()
            print(os.getpid(), step, flush=True)

    for _ in sys.stdin:  # the imports take seconds, a fork takes milliseconds
        child = os.fork()
        if not child:
            save_until_killed()
        os.waitpid(child, 0)
        print("killed", flush=True)
"""


def kill_saves(folder: Path, n_kills: int) -> int:
    """Kills a process that saves all the time, `n_kills` times, each at a random moment.

    After each kill the newest complete checkpoint must be at least the last one that was reported
    as saved, and bitwise what was saved. Returns how many kills left an incomplete save.
    """
    rng, n_incomplete, shape = random.Random(n_kills), 0, (256, 256)
    command = [sys.executable, "-c", textwrap.dedent(SAVES), str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        for _ in range(n_kills):
            process.stdin.write("save\n")
            pid, reported = map(int, process.stdout.readline().split())
            time.sleep(rng.random() * 0.3)
            os.kill(pid, signal.SIGKILL)
            while (line := process.stdout.readline()) != "killed\n":
                reported = int(line.split()[1])
            n_incomplete += any("tmp" in path.name for path in folder.iterdir())
            checkpointer = Checkpointer(folder, CheckpointConfig(keep=2))
            latest = checkpointer.latest_step()
            assert reported <= latest <= reported + 1
            for step in {reported, latest}:
                state, host = checkpointer.restore(numbers(0, n=24, shape=shape), step)
                assert_bitwise_equal(state, numbers(step, n=24, shape=shape))
                assert host == {"step": step}
            checkpointer.close()
    checkpointer = Checkpointer(folder, CheckpointConfig(keep=1))
    checkpointer.save(latest + 1, numbers(latest + 1), {})
    checkpointer.close()
    assert os.listdir(folder) == [str(latest + 1)]  # what the killed saves left is removed
    return n_incomplete


@pytest.mark.parametrize(
    "n_kills",
    [
        pytest.param(30, marks=pytest.mark.thorough),
        pytest.param(200, marks=pytest.mark.slow),
    ],
)
def test_a_save_that_is_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path, n_kills):
    n_incomplete = kill_saves(tmp_path / "checkpoints", n_kills)
    print(f"{n_kills} kills, {n_incomplete} of them left an incomplete save")
