"""Tests of jaxrl/runtime/multihost.py and sharding/hosts.py."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.config.keys import DistributedConfig
from jaxrl.config.resolve import default_config, resolve
from jaxrl.rollout.engines import merge_metrics
from jaxrl.runtime.multihost import (
    check_same_identity,
    is_multi_process,
    process_identity,
    slurm_devices,
)
from sharding import hosts
from tests.runtime.hosts.process_group import ROOT, free_port


@pytest.mark.parametrize(
    ("settings", "env", "several"),
    [
        ({}, {}, False),
        ({}, {"SLURM_STEP_NUM_TASKS": "1", "TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({}, {"SLURM_STEP_NUM_TASKS": "8"}, True),
        ({}, {"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({}, {"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({}, {"JAX_COORDINATOR_ADDRESS": "a:1"}, True),
        ({"coordinator": "a:1"}, {}, True),
        ({"start": "on"}, {}, True),
        ({"start": "off"}, {"SLURM_STEP_NUM_TASKS": "8"}, False),
    ],
)
def test_a_process_joins_others_if_config_or_environment_shows_several(settings, env, several):
    assert is_multi_process(DistributedConfig(**settings), env) is several


def test_one_slurm_task_per_node_takes_all_gpus_and_several_take_one_each():
    node = {"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_NUM_NODES": "2"}
    assert slurm_devices(node | {"SLURM_STEP_NUM_TASKS": "2"}) == [0, 1, 2, 3]
    assert slurm_devices(node | {"SLURM_STEP_NUM_TASKS": "8"}) is None
    assert slurm_devices({}) is None


def some_config(**changes):
    config = default_config()
    config.model.path, config.data.train = "model", ("task:addition",)
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        (config[section] if section else config)[key] = value
    return resolve(config)


def test_processes_may_differ_only_in_their_number_and_cache():
    one = process_identity(some_config())
    joined = dict(distributed__coordinator="a:1", distributed__num_processes=2)
    other = process_identity(
        some_config(**joined, distributed__process_id=1, compilation_cache="x")
    )
    check_same_identity([one, other])
    with pytest.raises(hosts.AgreedError, match=r"process 1 on .*checkpoint\.every: 0 -> 5"):
        check_same_identity([one, process_identity(some_config(checkpoint__every=5))])


def test_differing_versions_and_reward_files_are_reported(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def score(*args): return 0.0\n")
    cfg = some_config(reward__functions=(f"{reward}:score?scale=2",))
    one = process_identity(cfg)
    older = dataclasses.replace(one, host="h7", versions=one.versions | {"jax": "0.1"})
    with pytest.raises(hosts.AgreedError, match=r"process 1 on h7: jax: .* -> 0\.1"):
        check_same_identity([one, older])
    reward.write_text("def score(*args): return 1.0\n")
    with pytest.raises(hosts.AgreedError, match=r"reward\.py: \w{12} -> \w{12}"):
        check_same_identity([one, process_identity(cfg)])


def test_the_metrics_of_engines_add_up_where_they_count():
    names = ("tokens_per_s", "cache_utilization_max", "host_fraction")
    parts = [
        {f"rollout/{name}": value for name, value in zip(names, values, strict=True)}
        for values in ((10.0, 0.5, 0.2), (30.0, 0.9, 0.4))
    ]
    found = merge_metrics(parts)
    assert found["rollout/tokens_per_s"] == 40.0
    assert found["rollout/cache_utilization_max"] == 0.9
    assert found["rollout/host_fraction"] == pytest.approx(0.3)


def test_a_single_process_communicates_with_itself():
    assert hosts.gather("a") == ["a"] and hosts.gather_items([1, 2]) == [1, 2]
    assert hosts.local_slice(5) == slice(0, 5) and hosts.is_main_process()
    with pytest.raises(OSError, match="gone"), hosts.raise_together():
        raise OSError("gone")


@pytest.mark.parametrize(
    "orders",
    [
        pytest.param(("shuffled",), marks=pytest.mark.thorough),
        pytest.param(("in order", "reversed", "in turns"), marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_processes_exchange_messages_and_reshard_weights_for_any_device_order(tmp_path, orders):
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        str(Path(__file__).parent / "exchange.py"),
        f"localhost:{free_port()}",
    ]
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    processes = []
    for i, log in enumerate(logs):
        arguments = [*command, str(i), *orders]
        with log.open("w") as out:
            processes.append(subprocess.Popen(arguments, env=environment, stdout=out))
    assert [process.wait(240) for process in processes] == [0, 0]
    for log, part in zip(logs, ("slice(0, 2, None)", "slice(2, 5, None)"), strict=True):
        text = log.read_text()
        for order in orders:
            assert f"{order} True [(0, 'x'), (1, 'x')]" in text
        assert f"long [(3000000, {{0}}), (3000001, {{1}})] [1] {part}" in text
        assert "the devices of a process are no block of the mesh" in text
