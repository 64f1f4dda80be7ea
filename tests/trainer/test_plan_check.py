"""A run whose plan does not fit its devices does not start; one that fits gets its KV pages from the plan."""

import pytest

from jaxrl.config.resolve import resolve
from jaxrl.planner import check
from jaxrl.trainer.setup.run import open_run

GIB = 2**30


@pytest.fixture
def memory(monkeypatch):
    """Sets what the devices say of their memory (CPU devices say nothing)."""

    def says(n_bytes: int) -> None:
        monkeypatch.setattr("jaxrl.trainer.setup.devices.device_memory", lambda: n_bytes)

    return says


def test_devices_that_do_not_report_their_memory_are_not_checked():
    assert check.device_memory() is None


def test_a_run_that_does_not_fit_is_refused_with_its_numbers(tiny_config, memory):
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
def test_a_run_that_fits_takes_the_plans_pages(tiny_config, memory):
    memory(GIB)
    with open_run(resolve(tiny_config)) as run:
        assert run.engines.engine.rollout.n_pages == 16 * 3  # 16 sequences of three pages


def test_plan_check_can_be_left_out(tiny_config, memory):
    memory(2**20)
    tiny_config.plan_check = False
    with open_run(resolve(tiny_config)) as run:
        assert run.engines.engine.scheduler.pool.n_pages == 16 * 3
