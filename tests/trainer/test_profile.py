"""Tests of jaxrl/trainer/profile.py: the trace of a step names its phases."""

import contextlib
import gzip
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest

from jaxrl.config.keys import ProfileConfig, RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.tracking.progress import Progress
from jaxrl.train import train
from jaxrl.trainer.core import Clock, Core
from jaxrl.trainer.profile import traced_step


def core_of(folder, *steps):
    """A core with what a trace needs."""
    core = Core.__new__(Core)
    core.cfg = RunConfig(profile=ProfileConfig(steps=steps), run_dir=str(folder))
    core.clock = Clock(cfg=core.cfg, total_steps=9, validates=False)
    core.session = types.SimpleNamespace(progress=Progress(quiet=True))
    return core


def names(folder: pathlib.Path) -> set[str]:
    """The names of all events of the Perfetto trace in a folder."""
    (path,) = folder.rglob("perfetto_trace.json.gz")
    return {
        event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    }


def test_only_the_chosen_steps_are_traced_with_the_names_of_their_phases(tmp_path):
    core = core_of(tmp_path, 2)
    for core.clock.step in range(3):
        with traced_step(core), core.clock.timed("step"), core.clock.timed("old_log_prob"):
            jnp.ones(2).block_until_ready()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_2"]
    assert {"train", "step", "old logprobs"} <= names(tmp_path / "profile" / "step_2")
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_the_trace_of_a_step_that_raises_is_written(tmp_path):
    core = core_of(tmp_path, 1)
    with contextlib.suppress(KeyError), traced_step(core), core.clock.timed("reward"):
        raise KeyError
    assert "reward" in names(tmp_path)


def test_a_trace_that_cannot_be_written_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    core = core_of(tmp_path, 1)
    stop = jax.profiler.stop_trace

    def full_disk():
        stop()
        raise OSError("no space left on device")

    monkeypatch.setattr("jax.profiler.stop_trace", full_disk)
    with traced_step(core):
        pass
    assert "no space left on device" in capsys.readouterr().out


def test_a_step_after_the_last_one_is_refused(tiny_config):
    tiny_config.profile.steps = (3, 5)
    with pytest.raises(ValueError, match=r"profile\.steps has \[5\], but total_steps=4"):
        resolve(tiny_config)


@pytest.mark.thorough
def test_the_trace_of_a_run_has_every_phase_and_the_scopes_of_its_programs(tiny_config):
    tiny_config.profile.steps = (2,)
    tiny_config.total_steps = 2
    tiny_config.algorithm.kl_coef = 0.1
    tiny_config.algorithm.old_logp = "recompute"
    cfg = resolve(tiny_config)
    assert train(cfg)
    folder = cfg.run_path / "profile"
    phases = {"rollout", "reward", "experience", "old logprobs", "reference", "update"}
    assert phases <= names(folder)
    (programs,) = (path.read_bytes() for path in folder.rglob("*.xplane.pb"))
    for scope in (b"/rollout/", b"/score/", b"update)/", b"/optimizer/"):
        assert scope in programs
