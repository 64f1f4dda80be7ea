"""Tests of jaxrl/runtime/folder_lock.py: one run per folder, and no lock that outlives its run."""

import dataclasses
import errno
import fcntl
import io
import json
import os
import threading
import time

import pytest
from rich.console import Console

from jaxrl.runtime import folder_lock
from jaxrl.runtime.folder_lock import NAME, FolderLockError, lock_folder, this_process
from jaxrl.tracking.progress import Progress

QUIET = Progress()


@pytest.fixture
def fast(monkeypatch):
    """Heartbeats in hundredths of a second."""
    monkeypatch.setattr(folder_lock, "FIRST_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(folder_lock, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(folder_lock, "POLL_S", 0.01)
    monkeypatch.setattr(folder_lock, "STALE_S", 0.6)


def write_lock(folder, age_s=0.0, **changes):
    """The lock file that a process leaves when it is killed."""
    holder = dataclasses.replace(this_process(), **changes)
    (folder / NAME).write_text(json.dumps(dataclasses.asdict(holder)))
    os.utime(folder / NAME, (time.time() - age_s,) * 2)
    return holder


def test_a_second_run_is_refused_with_the_holder(tmp_path):
    with lock_folder(tmp_path, QUIET) as lock:
        with (
            pytest.raises(
                FolderLockError, match=rf"in use by process {os.getpid()} on .* since 20"
            ),
            lock_folder(tmp_path, QUIET),
        ):
            pass
        lock.check()
        assert (tmp_path / NAME).exists()
    assert not (tmp_path / NAME).exists()
    with lock_folder(tmp_path, QUIET):
        pass


def test_the_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path, QUIET):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_of_this_machine_is_taken_over_at_once(tmp_path):
    write_lock(tmp_path, pid=1)  # a process with this pid runs: it was reused
    output = io.StringIO()
    progress = Progress(Console(file=output, width=400), quiet=False)
    with lock_folder(tmp_path, progress) as lock:
        assert json.loads((tmp_path / NAME).read_text())["token"] == lock.holder.token
    assert "took over the run folder from process 1 on" in output.getvalue()


def test_an_old_lock_of_another_machine_is_taken_over_at_once(tmp_path):
    write_lock(tmp_path, machine="other", age_s=folder_lock.STALE_S + 1)
    with lock_folder(tmp_path, QUIET):
        pass


@pytest.mark.parametrize("content", ["", '{"host": 1}', "[]", "\0\xff", "x" * 5000, "[" * 5000])
def test_a_damaged_lock_file_is_taken_over_when_it_is_old(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    os.utime(tmp_path / NAME, (1.0, 1.0))
    with lock_folder(tmp_path, QUIET) as lock:
        assert json.loads((tmp_path / NAME).read_text())["token"] == lock.holder.token


def test_a_silent_lock_of_another_machine_is_taken_over_after_the_limit(tmp_path, fast):
    write_lock(tmp_path, machine="other")
    start = time.monotonic()
    with lock_folder(tmp_path, QUIET):
        assert time.monotonic() - start > 0.5


@pytest.mark.parametrize("ahead_s", [100.0, 1e6])
def test_a_heartbeat_in_the_future_is_taken_over_after_the_limit(tmp_path, fast, ahead_s):
    write_lock(tmp_path, machine="other", age_s=-ahead_s)
    start = time.monotonic()
    with lock_folder(tmp_path, QUIET):
        assert time.monotonic() - start > 0.5


def test_a_heartbeat_in_the_future_that_moves_is_respected(tmp_path, fast):
    write_lock(tmp_path, machine="other", host="far", pid=7, age_s=-1e6)
    timer = threading.Timer(0.2, lambda: os.utime(tmp_path / NAME, (time.time() + 1e6 + 15,) * 2))
    timer.start()
    with pytest.raises(FolderLockError, match="process 7 on far"), lock_folder(tmp_path, QUIET):
        pass
    timer.join()


def test_a_lock_of_another_machine_whose_heartbeat_moves_is_respected(tmp_path, fast):
    holder = write_lock(tmp_path, machine="other", host="far", pid=7)
    timer = threading.Timer(0.2, lambda: os.utime(tmp_path / NAME))
    timer.start()
    with pytest.raises(FolderLockError, match="process 7 on far"), lock_folder(tmp_path, QUIET):
        pass
    timer.join()
    assert json.loads((tmp_path / NAME).read_text()) == dataclasses.asdict(holder)


def test_a_lock_that_is_released_while_another_waits_is_free(tmp_path, fast, monkeypatch):
    monkeypatch.setattr(folder_lock, "STALE_S", 60.0)
    write_lock(tmp_path, machine="other")
    timer = threading.Timer(0.1, (tmp_path / NAME).unlink)
    timer.start()
    with lock_folder(tmp_path, QUIET):
        pass
    timer.join()


def test_without_locks_of_the_file_system_the_heartbeat_decides(tmp_path, fast, monkeypatch):
    def unsupported(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with (
        lock_folder(tmp_path, QUIET),
        pytest.raises(FolderLockError),
        lock_folder(tmp_path, QUIET),
    ):
        pass
    write_lock(tmp_path)
    with lock_folder(tmp_path, QUIET):
        pass


def test_a_run_whose_folder_was_taken_over_finds_out_and_keeps_the_new_lock(tmp_path, fast):
    with lock_folder(tmp_path, QUIET) as lock:
        other = write_lock(tmp_path, machine="other", host="far", pid=7)
        deadline = time.monotonic() + 5
        with pytest.raises(FolderLockError, match="was taken over by process 7 on far"):
            while time.monotonic() < deadline:
                lock.check()
                time.sleep(0.01)
    assert json.loads((tmp_path / NAME).read_text()) == dataclasses.asdict(other)


def test_of_many_that_start_together_one_gets_the_folder(tmp_path):
    for trial in range(20):
        if trial % 2:
            write_lock(tmp_path)  # left by a killed run
        started, ended, winners = threading.Barrier(8), threading.Barrier(8), []

        def start(started=started, ended=ended, winners=winners):
            started.wait()
            try:
                with lock_folder(tmp_path, QUIET):
                    winners.append(1)
                    ended.wait()
            except FolderLockError:
                ended.wait()

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1


def test_a_lock_file_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / NAME).mkdir()
    message = r"run\.lock cannot be written: Is a directory; free"
    with pytest.raises(FolderLockError, match=message), lock_folder(tmp_path, QUIET):
        pass
