"""Tests of jaxrl/trainer/setup/session.py: the messages of a run that finds no Ray."""

import types

import pytest

from jaxrl.config import resolve
from jaxrl.trainer.setup import session
from jaxrl.trainer.setup.session import connect_to_workers
from sharding import hosts
from tests.config.runnable import runnable


@pytest.fixture
def cfg():
    return resolve(runnable(schedule__mode="async", schedule__rollout_workers=3))


def test_a_run_without_ray_names_the_key_and_the_alternative(cfg, monkeypatch):
    def absent(name):
        raise ImportError("no module ray")

    monkeypatch.setattr("jaxrl.runtime.ray_cluster.importlib.import_module", absent)
    message = r"rollout_workers=3 needs Ray, .*uv pip install .ray.*; or set config.schedule.roll"
    with pytest.raises(ValueError, match=message):
        connect_to_workers(cfg)


@pytest.mark.parametrize(("n", "address"), [(1, None), (2, "auto")])
def test_a_cluster_that_does_not_answer_is_named(cfg, monkeypatch, n, address):
    def init(**options):
        assert options["address"] == address
        raise ConnectionError("no answer at 10.0.0.1:6379")

    ray = types.ModuleType("ray")
    monkeypatch.setattr(ray, "init", init, raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False, raising=False)
    monkeypatch.setattr(session, "import_ray", lambda *names: ray)
    monkeypatch.setattr(hosts, "n_processes", lambda: n)
    message = r"rollout_workers=3: no Ray cluster answers \(no answer at 10.*set RAY_ADDRESS"
    with pytest.raises(ValueError, match=message):
        connect_to_workers(cfg)


def test_a_run_without_workers_does_not_need_ray():
    assert connect_to_workers(resolve(runnable())) is None
