"""Damaged files of a checkpoint: every damage is an error, or the restored state is the saved one.

They cover jaxrl/checkpoint/checksums.py, and its use in checkpointer.py and weights.py.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.checkpoint.checksums import FILE, METADATA, write_checksums
from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.checkpoint.saved_arrays import SavedArrays, read_weights
from jaxrl.config.keys import CheckpointConfig
from tests.checkpoint.test_checkpointer import assert_bitwise_equal, numbers
from tests.runtime.hosts.process_group import free_port

SHAPE = (64, 64)
CFG = CheckpointConfig(best_metric="val/reward")
KINDS = ("flip", "truncate", "extend", "zero", "delete", "swap")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    checkpointer = Checkpointer(folder, CFG)
    for step in (1, 2):
        metrics = {"val/reward": step / 2}
        checkpointer.save(step, numbers(step, shape=SHAPE), {"step": step}, metrics)
    checkpointer.close()
    return folder


def files_of(folder: Path, step: int) -> list[str]:
    found = (path for path in (folder / str(step)).rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in found)


def damage(folder: Path, name: str, kind: str, seed: int) -> None:
    """Damages one file in one way; `seed` chooses the place, or the file to swap it with."""
    rng, path = random.Random(seed), folder / name
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data)) if data else 0
    match kind:
        case "flip" if data:
            data[place] ^= 1 << rng.randrange(8)
        case "truncate":
            del data[place:]
        case "extend":
            data += rng.randbytes(rng.randint(1, 9))
        case "zero":  # a page that was never written
            data[place : place + 4096] = bytes(len(data[place : place + 4096]))
        case "delete":
            path.unlink()
            return
        case "swap":
            other = folder / rng.choice(files_of(folder, 1) + files_of(folder, 2))
            content, data = bytes(data), bytearray(other.read_bytes())
            other.write_bytes(content)
    path.write_bytes(data)


def restore_2(folder: Path):
    checkpointer = Checkpointer(folder, CFG)
    try:
        return checkpointer.restore(numbers(0, shape=SHAPE), 2)
    finally:
        checkpointer.close()


def check_damage(saved: Path, copy: Path, name: str, kind: str, seed: int) -> None:
    """Every damage is detected, or the restored state and weights are bitwise the saved ones."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(saved, copy)
    damage(copy, name, kind, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a checkpoint without checksums
        try:
            state, host = restore_2(copy)
        except CheckpointError as error:
            assert str(copy) in str(error) and "\n" not in str(error)
            assert "remove that folder" in str(error)
        else:
            assert_bitwise_equal(state, numbers(2, shape=SHAPE))
            assert host == {"step": 2}
        try:
            weights = read_weights(copy, 2, numbers(2, shape=SHAPE).params)
        except CheckpointError as error:
            assert str(copy) in str(error)
        else:
            assert_bitwise_equal(weights, jax.tree.map(np.asarray, numbers(2, shape=SHAPE).params))


CASES = dict(
    index=st.integers(0, 1000), kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1)
)
SETTINGS = dict(deadline=None, suppress_health_check=list(HealthCheck))


@settings(max_examples=12, **SETTINGS)
@given(**CASES)
def test_damage_is_detected_or_without_effect(saved, tmp_path_factory, index, kind, seed):
    names = files_of(saved, 2)
    copy = tmp_path_factory.getbasetemp() / "damaged"
    check_damage(saved, copy, names[index % len(names)], kind, seed)


@pytest.mark.slow
@settings(max_examples=1000, **SETTINGS)
@given(**CASES)
def test_damage_is_detected_or_without_effect_1000(saved, tmp_path_factory, index, kind, seed):
    names = files_of(saved, 2)
    copy = tmp_path_factory.getbasetemp() / "damaged_1000"
    check_damage(saved, copy, names[index % len(names)], kind, seed)


@pytest.mark.parametrize("kind", ["flip", "truncate", "delete"])
def test_damaged_arrays_are_named_with_the_checkpoint_to_resume_from(saved, tmp_path, kind):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    data = max((folder / "2" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    damage(folder, str(data.relative_to(folder)), kind, seed=0)
    with pytest.raises(CheckpointError) as error:
        restore_2(folder)
    assert f"state/{data.relative_to(folder / '2' / 'state')}" in str(error.value)
    assert str(error.value).endswith("remove that folder to resume from step 1")
    with pytest.raises(CheckpointError, match=data.name):
        read_weights(folder, 2, numbers(2, shape=SHAPE).params)


@pytest.mark.thorough
def test_two_processes_share_the_checksums_and_stop_at_once_if_a_save_fails(tmp_path):
    command = [sys.executable, "tests/checkpoint/save_in_group.py", f"localhost:{free_port()}"]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(tmp_path / "checkpoints")],
            env=os.environ | {"PYTHONPATH": "."},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in (0, 1)
    ]
    first, second = [process.communicate(timeout=200)[0] for process in processes]
    for text in (first, second):
        assert "restored True {'step': 2}" in text
        assert re.search(r"damaged .*/2 cannot be read: process \d on .*ocdbt.process_1/d/", text)
    assert re.search(r"failed after [0-9] s .*No space left.*step 2 is intact", first)
    assert all(process.returncode for process in processes)


def test_the_folder_of_another_step_is_not_restored(saved, tmp_path):
    shutil.copytree(saved / "1", tmp_path / "copy" / "2")
    with pytest.raises(CheckpointError, match="is that of step 1"):
        restore_2(tmp_path / "copy")


def test_damaged_metrics_name_the_checkpoint_to_remove(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    (folder / "1" / "metrics" / "metrics").write_text('{"val/reward"')
    with pytest.raises(CheckpointError, match=r"copy/1 cannot be read: metrics/metrics is damaged"):
        restore_2(folder)


def forget_checksums(folder: Path, *, names: tuple[str, ...], metadata: dict | None) -> None:
    """Removes lists of checksums of step 2, and sets or removes what its metadata says of them."""
    for name in names:
        (folder / "2" / name).unlink()
    path = folder / "2" / METADATA
    if metadata is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | metadata))


EVERY_LIST = (FILE, f"state/ocdbt.process_0/{FILE}")


def test_a_checkpoint_of_a_version_without_checksums_is_restored_with_a_warning(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    forget_checksums(folder, names=EVERY_LIST, metadata={"custom_metadata": {}})
    with pytest.warns(UserWarning, match="of a version without checksums") as found:
        state, _ = restore_2(folder)
    assert len([w for w in found if w.category is UserWarning]) == 1
    assert_bitwise_equal(state, numbers(2, shape=SHAPE))


@pytest.mark.parametrize(
    ("names", "metadata"),
    [
        ((FILE,), {}),
        ((FILE,), {"custom_metadata": {}}),  # the lists of the arrays are there
        (EVERY_LIST, {}),
        (EVERY_LIST, {"custom_metadata": {"checksums": "of another version"}}),
        (EVERY_LIST, None),
    ],
    ids=["main list", "main list and its record", "every list", "another record", "no record"],
)
def test_lost_checksums_are_damage(saved, tmp_path, names, metadata):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    forget_checksums(folder, names=names, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"json is missing.*remove that .* from step 1"):
        restore_2(folder)
    with pytest.raises(CheckpointError, match=r"checksums\.json is missing"):
        read_weights(folder, 2, numbers(2, shape=SHAPE).params)


def test_a_checkpoint_is_read_by_a_relative_path(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    wanted = numbers(2, shape=SHAPE).params
    weights = read_weights(Path(saved.name), 2, wanted)
    jax.tree.map(np.testing.assert_array_equal, weights, wanted)
    arrays = SavedArrays(Path(saved.name), 2)
    name = next(iter(arrays.shapes))
    (values,), want = arrays.read([name]).values(), SavedArrays(saved, 2).read([name])
    np.testing.assert_array_equal(values, want[name])


def test_a_lost_list_of_the_arrays_is_damage(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    (folder / "2" / EVERY_LIST[1]).unlink()
    with pytest.raises(CheckpointError, match=r"ocdbt\.process_0/checksums\.json is missing"):
        restore_2(folder)


def move_and_link(path: Path, outside: Path) -> None:
    shutil.move(path, outside / path.name)
    path.symlink_to(outside / path.name)


@pytest.mark.parametrize("name", ["state/_METADATA", "state/ocdbt.process_0", "checksums.json"])
def test_a_link_in_a_checkpoint_is_refused(saved, tmp_path, name):
    shutil.copytree(saved, tmp_path / "copy")
    (tmp_path / "outside").mkdir()
    move_and_link(tmp_path / "copy" / "2" / name, tmp_path / "outside")
    with pytest.raises(CheckpointError, match=rf"{name} is a link to .*outside.*by a copy"):
        restore_2(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=rf"{name} is a link"):
        read_weights(tmp_path / "copy", 2, numbers(2, shape=SHAPE).params)


def test_a_checkpoint_that_is_a_link_is_refused_before_the_first_step(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    (tmp_path / "outside").mkdir()
    move_and_link(tmp_path / "copy" / "1", tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"copy/1 is a link; replace it by a copy"):
        restore_2(tmp_path / "copy")
    assert (tmp_path / "outside" / "1" / FILE).exists()


def test_a_save_does_not_write_through_a_link_of_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "run" / "1.orbax-checkpoint-tmp").symlink_to(tmp_path / "outside")
    checkpointer = Checkpointer(tmp_path / "run", CFG)
    checkpointer.save(1, numbers(1, shape=SHAPE), {})
    checkpointer.close()
    assert checkpointer.all_steps() == [1]
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["file"]


def test_the_folder_of_all_checkpoints_may_be_a_link(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "disk")
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    state, host = restore_2(tmp_path / "checkpoints")
    assert host == {"step": 2}
    assert_bitwise_equal(state, numbers(2, shape=SHAPE))


def test_a_list_of_an_inner_folder_replaces_its_files(tmp_path):
    (tmp_path / "process_0" / "d").mkdir(parents=True)
    (tmp_path / "process_0" / "d" / "data").write_bytes(b"123456789")
    write_checksums(tmp_path / "process_0")
    (tmp_path / "metadata").write_bytes(b"")
    write_checksums(tmp_path, step=3)
    inner = json.loads((tmp_path / "process_0" / FILE).read_text())
    assert inner == {"step": None, "crc32": {"d/data": [9, "cbf43926"]}}  # CRC-32's check value
    outer = json.loads((tmp_path / FILE).read_text())
    assert outer["step"] == 3 and set(outer["crc32"]) == {"metadata", f"process_0/{FILE}"}
