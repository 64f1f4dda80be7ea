"""Tests of jaxrl/runtime/device_memory.py: what a run may use of a GPU that JAX takes a part of."""

import jax
import pytest

from jaxrl.runtime import device_memory

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """gpu(share) has GPUs of 80 GiB, with the variable of JAX's share; "" leaves it unset."""

    def memory(share: str) -> dict[str, int]:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        for name in device_memory.MEMORY_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        if share:
            monkeypatch.setenv(device_memory.MEMORY_VARIABLES[1], share)
        return {"bytes_limit": int(80 * GIB * float(share or 0.75))}

    return memory


@pytest.mark.parametrize(
    ("share", "utilization", "gib"),
    [("0.92", 0.85, 68), ("0.92", 0.95, 73.6), ("0.5", 0.85, 40), ("", 0.85, 60), ("", 0.5, 40)],
)
def test_the_part_of_a_gpu_is_of_its_whole_memory(gpu, share, utilization, gib):
    stats = gpu(share)
    assert device_memory.whole_bytes(stats) == pytest.approx(80 * GIB)
    usable = device_memory.usable_bytes(stats, utilization)
    assert usable == pytest.approx(gib * GIB) and usable <= stats["bytes_limit"]


def test_a_tpu_reports_all_of_its_memory(monkeypatch, gpu):
    stats = gpu("0.92")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert device_memory.whole_bytes(stats) == stats["bytes_limit"]
