"""Tests of jaxrl/trainer/memory.py: running out of device memory is explained with the plan."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxrl.config.resolve import resolve
from jaxrl.planner.chips import CHIPS
from jaxrl.planner.plan import Phase, Plan
from jaxrl.planner.programs import Lengths
from jaxrl.train import train
from jaxrl.trainer.loop import exit_status, run_to_end
from jaxrl.trainer.memory import OutOfMemoryError, explain_out_of_memory
from jaxrl.trainer.rl_step import train_step, validate
from jaxrl.trainer.setup.opening import open_run

GIB = 2**30


def exhaust(*arguments, **more):
    """Raises the error of a compiled program that gets no memory for its result."""
    jax.jit(lambda x: jnp.broadcast_to(x, (2**50,)))(jnp.ones((), jnp.int8))


@pytest.fixture
def plan():
    """8 GiB of state, 10 KV pages of 0.5 GiB and an update of at most 12 GiB on 16 GiB."""
    phase = Phase(
        live_bytes=12 * GIB,
        fits=False,
        roofline_s=1.0,
        serial_s=1.0,
        bound="flops",
        tokens_per_s=1.0,
    )
    return Plan(
        topology="8 devices",
        chip=dataclasses.replace(CHIPS["v5e"], memory_bytes=16.0 * GIB),
        mesh={},
        fits=True,
        misfit="",
        programs={},
        phases={"update": phase},
        resident={"params": 2 * GIB, "opt_state": 6 * GIB},
        host_resident={},
        budget_bytes=14 * GIB,
        page_bytes=GIB // 2,
        kv_pages=10,
        kv_phases=("rollout", "scoring", "update"),
        max_concurrent_sequences=10,
        expected_step_s=1.0,
        serial_step_s=1.0,
        tokens_per_s=1.0,
        lengths=Lengths(1, 1),
        note="",
        n_replicas=1,
        rollout_weight_bytes=GIB,
    )


def test_the_message_has_the_plan_of_each_role_and_what_to_lower(plan, tmp_path):
    with pytest.raises(OutOfMemoryError) as raised, explain_out_of_memory(tmp_path, lambda: plan):
        exhaust()
    rows = {line[2:34].strip(): line[34:].split() for line in str(raised.value).splitlines()}
    assert rows["optimizer state"][:4] == ["6.00", "GiB", "38%", "learner.offload=optimizer,"]
    assert rows["KV pages"][:3] == ["5.00", "GiB", "31%"]
    # 12 GiB and 10 pages of 0.5 GiB
    assert rows["peak of update"][:4] == ["17.00", "GiB", "106%", "learner.token_budget,"]
    assert "RESOURCE_EXHAUSTED" in str(raised.value)
    profile = tmp_path / "memory.prof"
    assert str(profile) in str(raised.value)
    assert profile.read_bytes().startswith(b"\x1f\x8b")  # a gzipped profile of pprof


def test_the_error_is_explained_without_a_plan_too(tmp_path):
    def no_plan():
        raise ValueError("nothing compiles")

    with (
        pytest.raises(OutOfMemoryError, match="no plan of this run: nothing compiles"),
        explain_out_of_memory(tmp_path, no_plan),
    ):
        exhaust()


def test_a_program_that_only_generates_gets_its_keys(tmp_path):
    with (
        pytest.raises(OutOfMemoryError, match=r"KV pages .*rollout\.memory_utilization"),
        explain_out_of_memory(None, None),
    ):
        exhaust()


def test_other_errors_of_a_device_are_left_alone(plan, tmp_path):
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
        explain_out_of_memory(tmp_path, lambda: plan),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: a device is lost")
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_a_run_out_of_memory_saves_its_last_step_and_names_the_phase(tiny_config, tmp_path, capfd):
    cfg = resolve(tiny_config)

    def train(cfg):
        with open_run(cfg) as run:
            train_step(run)
            run.core.learner.update.accumulate = exhaust
            return run_to_end(run, train_step, validate)

    with pytest.MonkeyPatch.context() as patch:
        # which would end this process
        patch.setattr("sharding.hosts.exit_immediately", lambda status: None)
        assert exit_status(train, cfg) == 1
    message = capfd.readouterr().err
    assert "error: out of device memory in update of step 2: RESOURCE_EXHAUSTED" in message
    for words in ("policy weights", "peak of rollout", "peak of update", "rollout.max_num_seqs"):
        assert words in message
    assert (cfg.run_path / "memory.prof").is_file()
    assert (cfg.run_path / "checkpoints" / "1").is_dir()


@pytest.mark.thorough
def test_a_backend_without_host_memory_is_refused_before_weights_are_loaded(
    tiny_config, monkeypatch
):
    monkeypatch.setattr("sharding.tree.HOST_MEMORY_KIND", "shelf")
    monkeypatch.setattr(
        "jaxrl.trainer.setup.opening.load_core", lambda *_, **__: pytest.fail("built")
    )
    tiny_config.learner.offload = ("optimizer",)
    with pytest.raises(
        ValueError, match=r"learner\.offload=\('optimizer',\) needs .* shelf memory"
    ):
        train(resolve(tiny_config))
