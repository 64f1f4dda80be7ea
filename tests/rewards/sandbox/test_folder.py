"""Tests of jaxrl/rewards/sandbox/folder.py."""

import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from jaxrl.rewards.sandbox import folder
from jaxrl.rewards.sandbox.runner import SandboxLimits, run


@pytest.fixture
def memory():
    """A folder in memory: removing thousands of folders from a disk may take seconds."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as name:
        yield pathlib.Path(name)


def nest(top, depth):
    """A chain of folders, each with a file and a second folder."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("next", dir_fd=fd)
        os.mkdir("unreadable", 0, dir_fd=fd)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        inner = os.open("next", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


@pytest.mark.parametrize("depth", [3000, pytest.param(50_000, marks=pytest.mark.thorough)])
def test_a_folder_of_deeply_nested_folders_is_removed(memory, depth):
    nest(memory, depth)
    start = time.monotonic()
    folder.remove(memory)
    assert not memory.exists()
    assert time.monotonic() - start < depth / 500
    memory.mkdir()


def test_folders_that_a_program_nests_are_removed(memory, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(memory))
    nest_here = "import os\nfor _ in range(1200): os.mkdir('d'); os.mkdir('e', 0); os.chdir('d')"
    assert run(nest_here, limits=SandboxLimits(wall_s=10.0)).end == "ok"
    folder.wait_for_removals(limit_s=30.0)
    assert not list(memory.iterdir())


def test_a_folder_is_removed_in_the_background(monkeypatch, memory):
    monkeypatch.setattr("tempfile.tempdir", str(memory))
    may_remove = threading.Event()
    remove = folder.remove
    monkeypatch.setattr(folder, "remove", lambda path: may_remove.wait(60) and remove(path))
    with folder.temporary_folder("work") as path:
        pass
    assert path.exists()
    may_remove.set()
    folder.wait_for_removals(limit_s=30.0)
    assert not path.exists()


def test_folders_of_killed_processes_are_removed_and_those_in_use_are_kept(memory, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(memory))
    script = (
        f"import tempfile, time\ntempfile.tempdir = {str(memory)!r}\n"
        "from jaxrl.rewards.sandbox.folder import temporary_folder\n"
        "with temporary_folder('work') as path:\n"
        "    (path / 'work' / 'file').touch()\n    print('made', flush=True)\n    time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"made\n"
    (memory / "other").mkdir()
    with folder.temporary_folder() as kept:
        folder.remove_left(10.0)
        assert len(list(memory.iterdir())) == 3
        process.kill()
        process.communicate()
        folder.remove_left(10.0)
        assert {*memory.iterdir()} == {kept, memory / "other"}
    folder.wait_for_removals(limit_s=30.0)


def test_wide_and_unreadable_folders_and_links_are_removed(memory):
    outside = memory / "outside"
    outside.write_text("a")
    top = memory / "top"
    for i in range(200):
        (top / f"a{i}" / "b" / "c").mkdir(parents=True)
        (top / f"a{i}" / "b" / "file").write_text("a")
        (top / f"a{i}" / "b" / "link").symlink_to(outside)
        (top / f"a{i}" / "b" / "c").chmod(0)
    folder.remove(top)
    assert not top.exists() and outside.read_text() == "a"


def test_a_folder_that_cannot_be_removed_is_logged_and_does_not_raise(monkeypatch, caplog):
    monkeypatch.setattr(folder, "_RETRY_S", 0.0)
    monkeypatch.setattr(os, "rmdir", _fail)
    with folder.temporary_folder("work") as path:
        pass
    folder.wait_for_removals(limit_s=30.0)
    assert str(path) in caplog.text
    monkeypatch.undo()
    folder.remove(path)


def _fail(*_, **__):
    raise OSError("busy")


def test_an_error_in_the_block_is_raised_and_the_folder_removed():
    with pytest.raises(KeyError), folder.temporary_folder("work") as path:
        raise KeyError
    folder.wait_for_removals(limit_s=30.0)
    assert not path.exists()
