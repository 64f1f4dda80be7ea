"""Tests of jaxrl/trainer/setup/session.py: the run folder is created, locked and not damaged."""

import contextlib
import itertools
import json
import os
import signal
import time
from pathlib import Path

import jax
import pytest

from jaxrl.config import resolve
from jaxrl.config.saved import to_json
from jaxrl.dpo import train as train_dpo
from jaxrl.runtime.folder_lock import NAME, FolderLockError, lock_folder
from jaxrl.sft import train as train_sft
from jaxrl.tracking.json_lines import read_lines
from jaxrl.tracking.progress import Progress
from jaxrl.train import train
from jaxrl.trainer.setup.session import make_folder, open_folder, record_start, with_today
from tests.checkpoint.test_faults import tmpfs
from tests.trainer.offline.test_offline import offline
from tests.trainer.test_train import finish_process, start_process, wait_for_step

__all__ = ["tmpfs"]


@pytest.mark.parametrize("name", ["file", "file/run", "file/runs/run"])
def test_a_run_dir_that_is_a_file_is_one_message(tiny_config, tmp_path, name):
    (tmp_path / "file").write_text("content")
    tiny_config.run_dir = str(tmp_path / name)
    with pytest.raises(ValueError, match=r"run_dir is .*, but .*/file is a file; set config"):
        train(resolve(tiny_config))
    assert (tmp_path / "file").read_text() == "content"


def test_a_run_dir_that_is_a_url_is_rejected(tiny_config):
    tiny_config.run_dir = "gs://bucket/run"
    with pytest.raises(ValueError, match="run_dir='gs://bucket/run' is a URL"):
        resolve(tiny_config)


def test_every_start_of_a_run_is_recorded_with_its_versions(tmp_path):
    for resume_step in (None, None, 3):
        record_start(tmp_path, resume_step)
    new, resumed = read_lines(tmp_path / "starts.jsonl")  # the first run was overwritten
    assert (new["step"], resumed["step"]) == (0, 3)
    assert resumed["versions"]["jax"] == jax.__version__
    assert resumed["versions"].keys() >= {"Python", "source code of jaxrl"}
    assert resumed["devices"] == f"{jax.device_count()} x cpu"


def test_a_run_folder_that_cannot_be_created_is_one_message(tmp_path, monkeypatch):
    def read_only(*args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(ValueError, match="cannot be created: Read-only file system; set config"):
        make_folder(tmp_path / "run")


@pytest.mark.parametrize("program", [train, train_sft, train_dpo])
def test_a_run_in_a_folder_in_use_changes_nothing(tiny_config, program):
    folder = Path(tiny_config.run_dir)
    folder.mkdir()
    (folder / "config.json").write_text("of the first run")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    if program is not train:
        offline(tiny_config, tiny_config.data.train)
    with lock_folder(folder, Progress()):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(FolderLockError, match="is in use by process"):
            program(resolve(tiny_config))
        assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_failed_start_releases_the_folder(tiny_config):
    tiny_config.model.path = "/nowhere"
    with pytest.raises(ValueError, match="nowhere"):
        train(resolve(tiny_config))
    assert not (Path(tiny_config.run_dir) / NAME).exists()


@pytest.mark.parametrize("text", ["", '{"name": "a"', "[]"])
def test_a_damaged_config_file_is_one_message(tiny_config, text):
    folder = Path(tiny_config.run_dir)
    (folder / "checkpoints" / "1").mkdir(parents=True)
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json of the run folder is not"):
        open_folder(resolve(tiny_config))
    assert (folder / "config.json").read_text() == text


def test_the_date_of_the_first_start_is_kept_once_there_is_a_checkpoint(tiny_config):
    folder = Path(tiny_config.run_dir)
    folder.mkdir()
    cfg = resolve(tiny_config)

    def first_start(day):
        (folder / "config.json").write_text(to_json(with_today(cfg, day)))

    first_start("2024-02-29")
    assert open_folder(cfg).data.today > "2024-02-29"  # not resumed: the date of this start
    (folder / "checkpoints" / "1").mkdir(parents=True)
    first_start("2024-02-29")
    assert open_folder(cfg).data.today == open_folder(cfg).data.today == "2024-02-29"
    tiny_config.data.today = "2024-03-01"
    with pytest.raises(ValueError, match=r"data\.today: '2024-02-29' -> '2024-03-01'"):
        open_folder(resolve(tiny_config))


@pytest.mark.thorough
def test_two_trainers_in_one_folder(tiny_config, tmp_path):
    """The second is refused, also with resume; after a kill the next one resumes."""
    tiny_config.total_steps, tiny_config.checkpoint.every = 10_000, 1
    first = start_process(tiny_config, tmp_path)
    wait_for_step(tiny_config.run_dir, 1, first)
    for arguments in ((), ("--config.resume=True",)):
        second = start_process(tiny_config, tmp_path, *arguments)
        output, _ = second.communicate(timeout=200)
        assert second.returncode == 1
        assert f"is in use by process {first.pid} on" in output and "Traceback" not in output
    assert first.poll() is None
    first.kill()
    first.wait()
    killed_at = max(line["step"] for line in read_lines(Path(tiny_config.run_dir, "metrics.jsonl")))
    tiny_config.total_steps = killed_at + 1
    finish_process(tiny_config, tmp_path)
    steps = [
        line["step"]
        for line in read_lines(Path(tiny_config.run_dir, "metrics.jsonl"))
        if "reward/mean" in line
    ]
    assert steps == list(range(1, killed_at + 2))
    assert first.returncode == -signal.SIGKILL
    assert not (Path(tiny_config.run_dir) / NAME).exists()
    assert json.loads((Path(tiny_config.run_dir) / "config.json").read_text())["name"]


@pytest.mark.thorough
def test_a_run_whose_disk_has_no_inodes_left_ends_with_one_message(tiny_config, tmp_path, tmpfs):
    folder = tmpfs("size=64m,nr_inodes=200")
    tiny_config.total_steps, tiny_config.checkpoint.every = 40, 1
    tiny_config.run_dir = str(folder / "run")
    process = start_process(tiny_config, tmp_path)
    wait_for_step(tiny_config.run_dir, 3, process)
    with contextlib.suppress(OSError):
        for i in itertools.count():
            (folder / str(i)).touch()
    full_at = time.monotonic()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1, output
    assert time.monotonic() - full_at < 60
    assert "No space left on device" in output and "is intact" in output
    assert "Traceback" not in output
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    names = os.listdir(Path(tiny_config.run_dir) / "checkpoints")
    saved = max(int(name) for name in names if name.isdigit())
    tiny_config.total_steps = saved + 1
    finish_process(tiny_config, tmp_path, "--config.resume=True")


@pytest.mark.parametrize("target", ["mine.jsonl", "nothing"])
def test_links_to_files_in_a_run_folder_are_refused(target, tmp_path):
    (tmp_path / "mine.jsonl").write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")  # on a larger disk
    make_folder(run)
    (run / "metrics.jsonl").symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match=r"has links: metrics\.jsonl; a run would write"):
        make_folder(run)
