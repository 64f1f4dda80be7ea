"""The config of whole runs of the schedules."""

import pytest

from tests.trainer.schedule.local_workers import use_local_workers


@pytest.fixture
def config(tiny_config):
    """The tiny config with responses of several dispatches, which differ in length."""
    tiny_config.data.max_response_len = 16
    tiny_config.data.prompts_per_step = tiny_config.rollout.n = 2
    tiny_config.rollout.steps_per_dispatch = 2
    tiny_config.rollout.max_num_seqs = 4
    tiny_config.eval.every = 2
    return tiny_config


@pytest.fixture
def workers(config, monkeypatch):
    """The rollout workers of runs with `config`, two in the process of the test."""
    config.schedule.mode, config.schedule.rollout_workers = "async", 2
    return use_local_workers(monkeypatch.setattr)
