"""Whole runs with rollout workers on a local Ray cluster (jaxrl/rollout/remote)."""

import collections
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl.config import default_config, resolve
from jaxrl.train import train
from tests.runtime.hosts.process_group import write_config
from tests.trainer.conftest import short_is_good
from tests.trainer.test_train import assert_same_weights, metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
]

N_KILLS, WAIT_S = int(os.environ.get("JAXRL_TEST_KILLS", 20)), 2.0
RECORD = "JAXRL_TEST_RECORD"


@pytest.fixture
def cluster(monkeypatch):
    """A local Ray cluster with room for two actors, whose processes have the usual priority."""
    monkeypatch.setenv("RAY_worker_niceness", "0")
    from ray.cluster_utils import Cluster

    here = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield here
    here.shutdown()


@pytest.fixture
def config(config):
    """Two rollout workers."""
    config.schedule.mode = "async"
    config.schedule.rollout_workers = 2
    config.schedule.worker_timeout_s = 120.0
    return config


class Training:
    """A run in a separate process, and the file with what it prints."""

    def __init__(self, config, cluster, *arguments, program="jaxrl.train"):
        folder = Path(config.run_dir + "_config")
        folder.mkdir()
        path = write_config(config, folder)
        environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # workers start faster
        self.log = folder / "log"
        with self.log.open("w") as log:  # a full pipe would block the run
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, f"--config={path}", *arguments],
                env=os.environ | environment | {"RAY_ADDRESS": cluster.address},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self):
        return self.log.read_text()

    def workers(self):
        """Process ids of the workers that have joined, in order."""
        return [int(n) for n in re.findall(r"\(process (\d+)\) joined", self.text)]

    def wait_for(self, done, timeout_s=600):
        deadline = time.monotonic() + timeout_s
        while not done():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def finish(self, timeout_s=400):
        status = self.process.wait(timeout_s)
        assert status == 0, self.text
        return self.text


def trained(run_dir):
    """The lines of training steps, without what depends on the clock or the workers."""
    kept = (
        "reward/mean",
        "reward/std",
        "loss/",
        "staleness/",
        "rollout/response_len",
        "rollout/entropy",
    )
    lines = [line for line in metrics(run_dir) if "reward/mean" in line]
    return [{k: v for k, v in line.items() if k.startswith(kept)} for line in lines]


def paced_reward(data_source, solution_str, ground_truth, extra_info=None):
    """The reward of the tiny config, slower while a killed worker has not come back.

    Records the responses that it scores.
    """
    folder = Path(os.environ[RECORD])
    with (folder / "responses").open("a") as responses:
        responses.write(f"{ground_truth} {solution_str!r}\n")
    missing = folder / "missing"
    with contextlib.suppress(FileNotFoundError):
        # After a minute the calls become slower, so that the steps do not run out.
        end = time.time() + max(WAIT_S, (time.time() - missing.stat().st_mtime - 60.0) / 4)
        while missing.exists() and time.time() < end:
            time.sleep(0.05)
    return short_is_good(data_source, solution_str, ground_truth, extra_info)


def recorded(folder):
    """The responses that were scored, with how often each was."""
    path = folder / "responses"
    return collections.Counter(path.read_text().splitlines() if path.exists() else ())


@pytest.fixture
def record_folder(tmp_path, monkeypatch):
    """Makes an empty folder for what paced_reward records of the next run."""

    def make(name):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(RECORD, str(tmp_path / name))
        return tmp_path / name

    return make


def test_killed_workers_come_back_and_every_group_is_trained_exactly_once(
    config, tmp_path, cluster, record_folder
):
    """Kills one of two workers N_KILLS times, each during the next steps after a comeback.

    The reference is the same run with an engine thread in one process.
    """
    config.total_steps, config.eval.every = 10 * N_KILLS, 0
    config.data.max_response_len = 48
    config.reward.functions, config.reward.timeout_s = (f"{__file__}:paced_reward",), 600.0
    config.schedule.weight_transfer = "delta"
    record, random, dead = record_folder("record"), np.random.default_rng(0), set()
    run, start = Training(config, cluster), time.monotonic()
    while len(dead) < N_KILLS:
        run.wait_for(lambda: len(run.workers()) == 2 + len(dead))
        (record / "missing").unlink(missing_ok=True)
        n_scored = recorded(record).total() + random.integers(12)  # up to three steps later
        run.wait_for(lambda n=n_scored: recorded(record).total() >= n)
        time.sleep(random.uniform(0, 0.3))
        victim = int(random.choice(sorted(set(run.workers()) - dead)))
        (record / "missing").touch()
        os.kill(victim, signal.SIGKILL)
        dead.add(victim)
    run.wait_for(lambda: len(run.workers()) == 2 + N_KILLS)
    (record / "missing").unlink()
    output, seconds = run.finish(), time.monotonic() - start
    moved = [int(n) for n in re.findall(r"(\d+) requests continue on others", output)]
    assert len(moved) == N_KILLS

    killed, config.run_dir = config.run_dir, str(tmp_path / "whole")
    config.schedule = default_config().schedule
    config.schedule.mode, config.schedule.rollout_devices = "async", 1
    expected = record_folder("expected")
    assert train(resolve(config))
    lost, doubled = recorded(expected) - recorded(record), recorded(record) - recorded(expected)
    print(
        f"{N_KILLS} kills, {len(run.workers()) - 2} restarts, {config.total_steps * 2} groups, "
        f"{sum(moved)} requests of {sum(n > 0 for n in moved)} kills continued on others, "
        f"lost={lost.total()}, doubled={doubled.total()}, {seconds:.0f} s"
    )
    assert not lost and not doubled
    assert trained(config.run_dir) == trained(killed)
    assert_same_weights(config.run_dir, killed)


def test_a_host_that_joins_during_a_launched_run_is_used(config, cluster):
    config.total_steps, config.eval.every = 300, 0
    config.schedule.rollout_workers, config.schedule.weight_transfer = 0, "delta"
    hosts = ("--num-hosts=1", "--rollout-hosts=1:2")
    run = Training(config, cluster, *hosts, program="jaxrl.launch")
    run.wait_for(lambda: len(metrics(config.run_dir)) > 2 if run.workers() else False)
    assert len(run.workers()) == 1  # the trainer and one worker have the two CPUs
    cluster.add_node(num_cpus=1)
    run.wait_for(lambda: metrics(config.run_dir)[-1].get("workers/ready") == 2)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(400) == 130
    lines = [line for line in metrics(config.run_dir) if "workers/ready" in line]
    assert lines[0]["workers/ready"] == 1
    changed = [line.get("weights/changed_fraction", 0) for line in lines[2:]]
    assert max(changed) > 0  # a step whose groups are flat changes no weights


def test_a_worker_on_two_hosts_comes_back_and_gives_the_weights_of_one_process(
    config, tmp_path, cluster
):
    """An engine over one device of each host; the first process is killed."""
    config.total_steps, config.rollout.tensor = 20, 2
    config.schedule.rollout_workers, config.schedule.hosts_per_worker = 1, 2
    config.schedule.weight_transfer = "delta"
    run = Training(config, cluster)
    run.wait_for(lambda: len(metrics(config.run_dir)) > 3 if run.workers() else False)
    os.kill(run.workers()[0], signal.SIGKILL)
    output = run.finish()
    assert len(run.workers()) == 2
    assert len(re.findall(r"was lost: .*, of host \d of its 2; \d+ requests continue", output)) == 1
    killed, config.run_dir = config.run_dir, str(tmp_path / "whole")
    config.schedule = default_config().schedule
    config.schedule.mode, config.schedule.rollout_devices = "async", 2
    assert train(resolve(config))
    assert trained(config.run_dir) == trained(killed)
    assert_same_weights(config.run_dir, killed)


def test_a_worker_writes_the_turns_of_episodes(env_config, cluster):
    env_config.schedule.mode = "async"
    env_config.schedule.rollout_workers = 1
    run = Training(env_config, cluster)
    run.finish()
    lines = [line for line in metrics(env_config.run_dir) if "reward/mean" in line]
    assert len(lines) == 2 and all(line["env/failures"] == 0 for line in lines)
    assert max(line["mismatch/logp_diff_max"] for line in lines[:1]) < 1e-4
    assert any("val/reward" in line for line in metrics(env_config.run_dir))
