"""Tests of jaxrl/launch.py: without a cluster, and runs on a local Ray cluster of two nodes."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl.config.accelerators import resources
from jaxrl.launch import (
    USER_ERROR,
    ProcessResult,
    process_arguments,
    read_arguments,
    rollout_arguments,
    run_with_restarts,
)
from jaxrl.runtime.ray_cluster import import_ray
from tests.runtime.hosts.process_group import (
    ROOT,
    assert_close,
    assert_same_run,
    metrics,
    write_config,
)


def test_resources_reserved_per_host():
    assert resources("cpu") == {"CPU": 1}
    assert resources("gpu:8") == {"CPU": 1, "GPU": 8}
    assert resources("tpu:4") == {"CPU": 1, "TPU": 4}


@pytest.mark.parametrize("wrong", ["gpu", "gpu:0", "h100:8", "cpu:2", ""])
def test_an_unknown_accelerator_is_rejected(wrong):
    with pytest.raises(ValueError, match=r"--accelerator=.*gpu:N or tpu:N"):
        resources(wrong)


def test_the_launcher_separates_its_arguments_from_those_of_the_run():
    args, rest = read_arguments(["--num-hosts=2", "--config=a.py", "--config.rollout.n=4"])
    assert (args.num_hosts, args.accelerator, args.max_failures) == (2, "cpu", 3)
    assert rest == ["--config=a.py", "--config.rollout.n=4"]


def test_the_tpu_runtime_orders_the_hosts_of_a_slice():
    args, rest = read_arguments(["--num-hosts=2", "--accelerator=tpu:4", "--config=a.py"])
    expected = [*rest, "--config.distributed.start=on"]
    assert process_arguments(None, [None, None], args, rest) == [expected, expected]


def test_rollout_hosts_are_workers_of_the_schedule():
    args, _ = read_arguments(["--num-hosts=8", "--rollout-hosts=2:8", "--accelerator=gpu:8"])
    config = ["--config=configs/quickstart.py"]
    assert rollout_arguments(args, config) == [
        "--config.schedule.rollout_workers=2",
        "--config.schedule.max_rollout_workers=8",
        "--config.schedule.worker_accelerator=gpu:8",
    ]
    groups = [*config, "--config.schedule.hosts_per_worker=2"]
    assert rollout_arguments(args, groups)[:2] == [
        "--config.schedule.rollout_workers=1",
        "--config.schedule.max_rollout_workers=4",
    ]
    args.rollout_hosts = "3"
    assert rollout_arguments(args, config)[1].endswith("=3")
    with pytest.raises(ValueError, match=r"rollout-hosts=3 .*hosts_per_worker=2 hosts; give mult"):
        rollout_arguments(args, groups)
    args.rollout_hosts = ""
    assert rollout_arguments(args, config) == []


@pytest.mark.parametrize("wrong", ["x", "0", "2:x", "-1", "1:2:3"])
def test_unknown_rollout_hosts_are_rejected(wrong):
    args, _ = read_arguments(["--num-hosts=1", f"--rollout-hosts={wrong}"])
    with pytest.raises(ValueError, match=r"--rollout-hosts=.*N:M"):
        rollout_arguments(args, [])


def test_a_missing_ray_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"jaxrl.launch needs Ray.*uv pip install .ray.*or wait"):
        import_ray("jaxrl.launch", "wait")


@pytest.mark.parametrize(
    ("attempts", "status", "n_starts"),
    [
        ([(0, 0)], 0, 1),
        ([(137, 134), (0, 0)], 0, 2),  # a host died, and the restart succeeded
        ([(137, 134), (1, 137), (137, 137), (0, 0)], 1, 3),  # two restarts are allowed
        (
            [(USER_ERROR, USER_ERROR), (0, 0)],
            USER_ERROR,
            1,
        ),  # user error on all processes: no restart
        ([(130, 130), (0, 0)], 130, 1),  # interrupted and saved
    ],
)
def test_the_group_is_restarted_when_a_process_is_lost(monkeypatch, attempts, status, n_starts):
    started = []

    def run_group(ray, args, arguments):
        started.append(arguments)
        return [ProcessResult(one) for one in attempts[len(started) - 1]]

    monkeypatch.setattr("jaxrl.launch.run_group", run_group)
    args, rest = read_arguments(["--num-hosts=2", "--max-failures=2"])
    assert run_with_restarts(None, args, rest) == status
    assert len(started) == n_starts


# ---- a real cluster

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")


@pytest.fixture
def cluster():
    """A local cluster: a head without CPUs, and two hosts of one CPU each."""
    from ray.cluster_utils import Cluster

    here = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    hosts = [here.add_node(num_cpus=1) for _ in range(2)]
    here.wait_for_nodes()
    yield here, hosts
    here.shutdown()


def launch(
    config, folder: Path, address: str, *arguments: str, n_devices: int = 4
) -> subprocess.Popen:
    path = write_config(config, folder)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(n_devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "jaxrl.launch", f"--config={path}", f"--address={address}"]
    log = folder / f"launch_{time.monotonic_ns()}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--num-hosts=2", *arguments],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    process.log = log
    return process


def finish(process: subprocess.Popen, timeout_s: float = 400) -> str:
    assert process.wait(timeout_s) == 0, process.log.read_text()
    return process.log.read_text()


def wait_for_checkpoint(run_dir: str, step: int, process, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.log.read_text()
        if Path(run_dir, "checkpoints", str(step)).is_dir():
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {step} within {timeout_s} s: {process.log.read_text()}")


@needs_ray
@pytest.mark.slow
def test_two_ray_hosts_give_the_numbers_of_one_process(
    cluster, start_group, group_config, tmp_path
):
    start_group(group_config, n=1, n_devices=8).finish()
    reference = group_config.run_dir
    group_config.run_dir = str(tmp_path / "ray")
    output = finish(launch(group_config, tmp_path, cluster[0].address))
    assert "in 2 processes" in output and "Hugging Face export" in output
    assert_same_run(group_config.run_dir, reference)


@needs_ray
@pytest.mark.slow
def test_a_dead_host_is_replaced_and_the_run_resumes_bitwise(
    cluster, start_group, group_config, tmp_path
):
    group_config.total_steps = 8
    group_config.checkpoint.every = 1
    start_group(group_config, n=2, n_devices=4).finish()
    unbroken = group_config.run_dir
    group_config.run_dir = str(tmp_path / "ray")
    here, hosts = cluster
    process = launch(group_config, tmp_path, here.address)
    wait_for_checkpoint(group_config.run_dir, 2, process)
    here.remove_node(hosts[1], allow_graceful=False)
    here.add_node(num_cpus=1)
    output = finish(process)
    assert "failure 1 of at most 3" in output and "resuming after step" in output
    assert_close(group_config.run_dir, unbroken, atol=0)
    assert metrics(group_config.run_dir) == metrics(unbroken)


@needs_ray
@pytest.mark.slow
def test_ctrl_c_at_the_launcher_saves_on_all_hosts(cluster, group_config, tmp_path):
    group_config.total_steps = 500
    group_config.checkpoint.every = 1
    process = launch(group_config, tmp_path, cluster[0].address)
    wait_for_checkpoint(group_config.run_dir, 1, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, process.log.read_text()
    assert "SIGINT: saved after step" in process.log.read_text()
