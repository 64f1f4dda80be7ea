"""Partial and asynchronous runs of two processes, each with its own engine."""

import json
import signal
from pathlib import Path

import pytest

from tests.runtime.hosts.process_group import assert_close, metrics
from tests.runtime.hosts.test_launch import cluster, finish, launch, needs_ray
from tests.trainer.tiny_episodes import ENVIRONMENTS

__all__ = ["cluster"]
CLOCK = ("buffer/waited_s", "busy_s", "idle_fraction")


@pytest.fixture
def partial_config(group_config):
    """Two steps on one training device of each process; responses of several dispatches."""
    group_config.mesh.fsdp, group_config.mesh.tensor = 2, 1
    group_config.learner.mini_batch_prompts = 0
    group_config.algorithm.kl_coef = 0.0
    group_config.data.max_response_len = 16
    group_config.rollout.steps_per_dispatch = 2
    group_config.schedule.mode = "partial"
    return group_config


@pytest.fixture
def async_config(partial_config):
    """The same, with one more device of each process for the rollout."""
    partial_config.schedule.mode = "async"
    partial_config.schedule.rollout_devices = 1
    return partial_config


def trained(run_dir):
    """The lines of training steps, without the clock."""
    return [
        {name: value for name, value in line.items() if not any(word in name for word in CLOCK)}
        for line in metrics(run_dir)
        if "reward/mean" in line
    ]


@pytest.mark.slow
def test_without_staleness_two_processes_give_the_weights_of_sync(
    start_group, async_config, tmp_path
):
    async_config.schedule.max_staleness = 0
    (first, _) = start_group(async_config, n=2, n_devices=2).finish()
    assert "in 2 processes, rollout on 2 more" in first
    separate = async_config.run_dir
    async_config.run_dir = str(tmp_path / "sync")
    async_config.schedule.update(mode="sync", rollout_devices=0, max_staleness=1)
    start_group(async_config, n=2, n_devices=1).finish()
    assert_close(separate, async_config.run_dir, atol=0)
    losses = [
        [line["loss/total"] for line in trained(folder)]
        for folder in (separate, async_config.run_dir)
    ]
    assert losses[0] == losses[1]


@pytest.mark.thorough
def test_partial_without_staleness_gives_the_weights_of_sync(start_group, partial_config, tmp_path):
    partial_config.schedule.max_staleness = 0
    (first, _) = start_group(partial_config, n=2, n_devices=1).finish()
    assert "in 2 processes" in first
    partial = partial_config.run_dir
    partial_config.run_dir = str(tmp_path / "sync")
    partial_config.schedule.update(mode="sync", max_staleness=1)
    start_group(partial_config, n=2, n_devices=1).finish()
    assert_close(partial, partial_config.run_dir, atol=0)
    one, other = trained(partial), trained(partial_config.run_dir)
    assert [line["loss/total"] for line in one] == [line["loss/total"] for line in other]


def lines_of_equal_runs(start_group, config, tmp_path, *, n_devices):
    """Training's lines of 6 steps, the same in one run and in one that resumes after step 3.

    Both are in two processes. Leaves the folder of the resumed run in `config`.
    """
    start_group(config, n=2, n_devices=n_devices).finish()
    whole = config.run_dir
    config.run_dir, config.total_steps = str(tmp_path / "resumed"), 3
    start_group(config, n=2, n_devices=n_devices).finish()
    config.total_steps = 6
    start_group(config, n=2, n_devices=n_devices).finish()
    assert_close(whole, config.run_dir, atol=0)
    lines = trained(whole)
    assert lines == trained(config.run_dir)
    assert max(line["rollout/versions_per_response"] for line in lines) > 1
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_resumed_partial_run_is_bitwise_equal_and_resumes_in_one_process(
    start_group, partial_config, tmp_path, dynamic
):
    """With kept KV, or with dynamic sampling and without the prompts that are solved.

    3 of 5 prompts are of the second process. The engines have too few slots for all responses, so
    these are of several versions.
    """
    config = partial_config
    config.data.prompts_per_step, config.rollout.n = 5, 6
    config.mesh.replica, config.mesh.fsdp = 2, 1
    config.schedule.update(max_staleness=2, keep_kv=not dynamic)
    config.total_steps, config.eval.every, config.checkpoint.every = 6, 3, 3
    if dynamic:
        config.data.skip_solved, config.algorithm.dynamic_sampling = 0.5, True
        config.algorithm.dynamic_sampling_batches = 2
        config.algorithm.dynamic_sampling_range = (0.0, 0.5)
    lines = lines_of_equal_runs(start_group, config, tmp_path, n_devices=1)
    if dynamic:
        assert max(line["rollout/batches"] for line in lines) == 2
        assert max(line["data/solved"] for line in lines) > 0
    else:
        assert max(line["staleness/max"] for line in lines) >= 1
    config.total_steps = 8
    start_group(config, n=1, n_devices=2).finish()
    lines = trained(config.run_dir)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line["staleness/max"] <= 2 for line in lines)


@pytest.mark.slow
def test_a_resumed_run_of_two_processes_is_bitwise_equal_to_an_uninterrupted_one(
    start_group, async_config, tmp_path
):
    """3 of 4 devices of each process train; 3 of 5 prompts of a step are of the second process."""
    async_config.data.prompts_per_step, async_config.rollout.n = 5, 6
    async_config.mesh.replica, async_config.mesh.fsdp = 6, 1
    async_config.schedule.max_staleness = 2
    async_config.total_steps, async_config.eval.every = 6, 3
    async_config.checkpoint.every = 3
    lines = lines_of_equal_runs(start_group, async_config, tmp_path, n_devices=4)
    assert max(line["staleness/max"] for line in lines) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "partial"])
def test_ctrl_c_at_one_process_saves_what_is_in_flight_in_both(start_group, async_config, mode):
    async_config.total_steps, async_config.schedule.max_staleness = 400, 2
    if mode == "partial":
        async_config.schedule.update(mode=mode, rollout_devices=0)
    group = start_group(async_config, n=2, n_devices=2 if mode == "async" else 1)
    group.wait_for_step(async_config.run_dir, 2)
    group.processes[1].send_signal(signal.SIGINT)
    first, _ = group.outputs()
    assert [process.returncode for process in group.processes] == [130, 130], first
    assert "SIGINT: saved after step" in first
    (saved,) = Path(async_config.run_dir, "checkpoints").iterdir()
    host = json.loads((saved / "host" / "metadata").read_text())
    assert len(host["in_flight"]["processes"]) == 2
    assert all(one["groups"] for one in host["in_flight"]["processes"])
    async_config.total_steps = int(saved.name) + 3
    start_group(async_config, n=2, n_devices=2 if mode == "async" else 1).finish()
    steps = [line["step"] for line in trained(async_config.run_dir)]
    assert steps == list(range(1, async_config.total_steps + 1))
    assert max(line["staleness/max"] for line in trained(async_config.run_dir)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "partial"])
def test_episodes_of_two_processes_outlive_updates(start_group, async_config, tmp_path, mode):
    if mode == "partial":
        async_config.schedule.update(mode=mode, rollout_devices=0)
    path = tmp_path / "environments.py"
    path.write_text(ENVIRONMENTS)
    async_config.env.name = f"{path}:Letters"
    async_config.reward.functions = ("environment",)
    async_config.data.max_response_len = 64
    async_config.rollout.sampling.stop = ("a", "e", "i", "o", "u", "0", "1", "2", " ")
    async_config.total_steps, async_config.schedule.max_staleness = 4, 2
    start_group(async_config, n=2, n_devices=2 if mode == "async" else 1).finish()
    lines = trained(async_config.run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert max(line["staleness/max"] for line in lines) == 2
    assert any(line["env/turns"] > 1 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["process", pytest.param("ray", marks=needs_ray)])
def test_rollout_workers_of_two_processes_give_the_weights_of_their_local_engines(
    start_group, async_config, tmp_path, place, request
):
    """With one worker, the second process generates nothing."""
    async_config.total_steps, async_config.eval.every = 3, 2
    start_group(async_config, n=2, n_devices=2).finish()
    local = async_config.run_dir
    async_config.schedule.update(rollout_devices=0, weight_transfer="delta")
    here = request.getfixturevalue("cluster")[0] if place == "ray" else None
    for n_workers in (1, 2):
        async_config.run_dir = str(tmp_path / f"{n_workers}_workers")
        if here is not None:
            here.add_node(num_cpus=1)
            hosts = f"--rollout-hosts={n_workers}"
            output = finish(launch(async_config, tmp_path, here.address, hosts, n_devices=1))
        else:
            async_config.schedule.rollout_workers = n_workers
            program = "tests.trainer.schedule.local_workers"
            output, _ = start_group(async_config, n=2, n_devices=1, program=program).finish()
        assert "in 2 processes" in output
        assert_close(async_config.run_dir, local, atol=0)
        lines = trained(async_config.run_dir)
        names = ("reward/mean", "loss/total", "staleness/max", "rollout/response_len")
        for line, expected in zip(lines, trained(local), strict=True):
            assert [line[name] for name in names] == [expected[name] for name in names]
            assert line["workers/ready"] == n_workers and line["workers/lost"] == 0
        assert any("val/reward" in line for line in metrics(async_config.run_dir))
