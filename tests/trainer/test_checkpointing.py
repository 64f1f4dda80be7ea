"""Tests of jaxrl/trainer/checkpointing.py: what is saved when a run ends with an error."""

from types import SimpleNamespace

import pytest

from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.trainer import checkpointing
from jaxrl.trainer.checkpointing import check_source, save_after_error
from jaxrl.trainer.core import Core
from jaxrl.trainer.phases.update import NonFiniteError
from sharding import hosts


@pytest.fixture
def core(monkeypatch):
    """A core that records `saved` steps and the `status` lines."""
    core = object.__new__(Core)
    core.saved, core.status = [], []
    core.clock = SimpleNamespace(step=7, step_restartable=True)
    core.session = SimpleNamespace(progress=SimpleNamespace(status=core.status.append))
    monkeypatch.setattr(checkpointing, "save", lambda core: core.saved.append(core.clock.step))
    monkeypatch.setattr(
        checkpointing, "report_saved", lambda core, reason: core.status.append(reason)
    )
    return core


def test_an_export_without_its_model_folder_says_how_to_repeat_it(core, tmp_path):
    core.cfg = SimpleNamespace(run_path=tmp_path / "run")
    core.models = SimpleNamespace(folders=SimpleNamespace(policy=tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"gone has no config\.json.*checkpoint of step 7 is comp"):
        check_source(core)


@pytest.mark.parametrize("error", [ChildProcessError, ValueError, RuntimeError, NonFiniteError])
def test_the_last_complete_step_is_saved(core, error):
    save_after_error(core, error("why"))
    assert core.saved == [7] and core.status == ["the run stops with an error"]


def test_a_step_that_has_begun_its_updates_is_not_saved(core):
    core.clock.step_restartable = False
    save_after_error(core, ChildProcessError("why"))
    assert not core.saved


def test_a_failed_save_is_not_repeated(core):
    save_after_error(core, CheckpointError("the disk is full"))
    assert not core.saved


def test_a_save_that_fails_too_is_reported(core, monkeypatch):
    def fail(core):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(checkpointing, "save", fail)
    save_after_error(core, ChildProcessError("why"))
    assert core.status == [
        "the last complete step could not be saved: CheckpointError: the disk is full"
    ]


def test_several_processes_save_only_after_an_error_of_all(core, monkeypatch):
    monkeypatch.setattr(hosts, "n_processes", lambda: 2)
    save_after_error(core, ChildProcessError("of this process"))
    assert not core.saved
    save_after_error(core, hosts.AgreedError("of all processes"))
    assert core.saved == [7]
