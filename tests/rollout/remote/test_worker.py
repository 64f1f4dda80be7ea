"""Tests of jaxrl/rollout/remote/worker.py: what a worker is refused for."""

import os
import pickle

import jax
import jax.numpy as jnp
import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.models.config import uniform_decoder
from jaxrl.rollout.remote import worker as worker_module
from jaxrl.rollout.remote.work import WorkerSettings
from jaxrl.rollout.remote.worker import RolloutWorker

TINY = uniform_decoder("llama", L=1, D=16, N=2, K=1, H=8, F=16, V=64, tied=True, max_len=64)
VERSIONS = {"jax": "1.0", "Python": "3.12.1"}


@pytest.fixture(autouse=True)
def this_machine(monkeypatch):
    monkeypatch.setattr(worker_module, "versions", lambda: VERSIONS)
    monkeypatch.setattr(worker_module.socket, "gethostname", lambda: "host7")


def refused(expected=VERSIONS, **changes):
    fields = dict(platform=jax.default_backend(), model="other")
    settings = WorkerSettings(RunConfig(), TINY, jnp.dtype("float32"), (), **fields | changes)
    return RolloutWorker(list).register(expected, pickle.dumps(settings)).refused


def test_a_worker_says_where_it_runs():
    assert str(RolloutWorker(list).locate()) == f"host7 (process {os.getpid()})"


def test_other_versions_are_refused_before_the_settings_are_read():
    expected = VERSIONS | {"jax": "2.0", "source code of jaxrl": "abc"}
    assert RolloutWorker(list).register(expected, b"not a pickle").refused == (
        "host7: jax is 1.0 on the worker and 2.0 in the trainer; "
        "source code of jaxrl is None on the worker and abc in the trainer"
    )


def test_another_platform_is_refused():
    found = refused(platform="tpu")
    assert found == "host7: JAX runs on cpu on the worker and on tpu in the trainer"


def test_a_model_with_other_weights_is_refused():
    assert refused() == "host7: its model has other weights than the trainer's"
