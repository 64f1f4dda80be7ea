"""Tests of the plan check in jaxrl/trainer/setup/devices.py, and of jaxrl/planner/check.py.

A run that does not fit its devices does not start; one that fits takes the KV pages of the plan."""

import pytest

from jaxrl.config.resolve import resolve
from jaxrl.planner import check
from jaxrl.trainer.setup.opening import open_run

GIB = 2**30


@pytest.fixture
def memory(monkeypatch):
    """memory(n_bytes) sets the memory that devices report; CPU devices report none."""

    def report(n_bytes: int) -> None:
        monkeypatch.setattr("jaxrl.trainer.setup.devices.device_memory", lambda: n_bytes)

    return report


def test_devices_without_a_memory_report_are_not_checked():
    assert check.device_memory() is None


@pytest.mark.thorough
def test_a_run_that_does_not_fit_is_rejected_with_its_memory_use(tiny_config, memory):
    memory(2**20)
    with (
        pytest.raises(
            ValueError, match=r"does not fit its devices: \w+ needs .*GiB of the 0\.00"
        ) as e,
        open_run(resolve(tiny_config)),
    ):
        pass
    for word in ("accumulate", "decode", "KV pages", "plan_check=False"):
        assert word in str(e.value)


@pytest.mark.thorough
def test_a_run_that_fits_gets_the_kv_pages_of_the_plan(tiny_config, memory):
    memory(GIB)
    with open_run(resolve(tiny_config)) as run:
        assert run.engines.engine.rollout.n_pages == 16 * 3  # 16 sequences of three pages


@pytest.mark.thorough
def test_plan_check_can_be_disabled(tiny_config, memory):
    memory(2**20)
    tiny_config.plan_check = False
    with open_run(resolve(tiny_config)) as run:
        assert run.engines.engine.scheduler.pool.n_pages == 16 * 3
