"""Whole runs whose reward functions are slow or never answer."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from jaxrl.config import resolve
from jaxrl.engine.engine import PagedEngine
from jaxrl.train import train
from tests.trainer.conftest import short_is_good
from tests.trainer.test_train import metrics

RECORD = "JAXRL_TEST_SLOW_REWARDS"
SECONDS = 0.5


def slow_reward(data_source, solution_str, ground_truth, extra_info=None):
    """Takes SECONDS, and records when it began and ended."""
    start = time.time()
    time.sleep(SECONDS)
    with Path(os.environ[RECORD]).open("a") as calls:
        calls.write(f"{start} {time.time()}\n")
    return short_is_good(data_source, solution_str, ground_truth, extra_info)


def stuck_reward(data_source, solution_str, ground_truth, extra_info=None):
    """Never answers for the first response that it sees."""
    with contextlib.suppress(FileExistsError):
        Path(os.environ[RECORD]).touch(exist_ok=False)
        time.sleep(1e6)
    return short_is_good(data_source, solution_str, ground_truth, extra_info)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The file that the reward functions write."""
    monkeypatch.setenv(RECORD, str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture(params=["partial", "async"])
def scheduled(request, config):
    """The config of a run of four steps in each schedule."""
    config.schedule.mode = request.param
    config.schedule.rollout_devices = int(request.param == "async")
    config.total_steps, config.eval.every, config.eval.before_train = 4, 0, False
    config.reward.workers = 2
    return config


@pytest.mark.thorough
def test_slow_rewards_are_computed_while_the_engine_generates(scheduled, record, monkeypatch):
    dispatches, generate = [], PagedEngine.generate

    def timed(self, params):
        start = time.time()
        found = generate(self, params)
        dispatches.append((start, time.time()))
        return found

    monkeypatch.setattr(PagedEngine, "generate", timed)
    scheduled.reward.functions = (f"{__file__}:slow_reward",)
    assert train(resolve(scheduled))
    calls = [tuple(map(float, line.split())) for line in record.read_text().splitlines()]
    assert len(calls) >= 4 * 4
    covered = sum(any(a < end and start < b for a, b in dispatches) for start, end in calls)
    assert covered >= 2  # none if rewards began after the rollout


@pytest.mark.thorough
def test_a_reward_that_never_answers_costs_its_own_response(scheduled, record):
    scheduled.reward.functions = (f"{__file__}:stuck_reward",)
    scheduled.reward.timeout_s, scheduled.reward.max_error_fraction = 3.0, 0.5
    assert train(resolve(scheduled))
    lines = [line for line in metrics(scheduled.run_dir) if "reward/mean" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert sum(line["reward/errors"] for line in lines) == 1
    assert all(line["buffer/dropped"] == 0 for line in lines)
