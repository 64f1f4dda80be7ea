"""Tests of jaxrl/rollout/remote/groups.py: workers of several processes, which are one worker."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import DistributedConfig, RunConfig
from jaxrl.engine.api import Request
from jaxrl.layout import worker_layout
from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import init_model
from jaxrl.rollout.remote import groups as groups_module
from jaxrl.rollout.remote.actors import ActorGroup, Actors, GroupActors, RayActors, WorkerLost
from jaxrl.rollout.remote.groups import WorkerGroups
from jaxrl.rollout.remote.pool import NoWorkers, WorkerPool
from jaxrl.rollout.remote.weights import RemoteWeights
from jaxrl.rollout.remote.work import Location, Work, WorkerSettings, model_digest
from sharding import make_mesh
from sharding.rules import TRAIN
from tests.engine.engine_cases import SMALL
from tests.rollout.remote.test_pool import (
    LENGTH,
    Cluster,
    collect,
    make_pool,
    request,
    weights,
    without_delays,
)
from tests.rollout.remote.worker_processes import ProcessActors

__all__ = ["without_delays"]
NOTHING = Work(free=(), update=None, version=0, submit=())
DISTRIBUTED = DistributedConfig(heartbeat_timeout_s=7)


class Pairs(Cluster):
    """Implements GroupActors; a process is a worker of the cluster."""

    def __init__(self, *arguments, **sizes):
        super().__init__(*arguments, **sizes)
        self.groups, self.released, self.joined = [], [], []

    def start_group(self, n_hosts):
        group = ActorGroup(tuple(self.start() for _ in range(n_hosts)), self.release)
        self.groups.append(group)
        return group

    def release(self):
        self.released.append(self.n_started)

    def locate(self, worker):
        place = Location(f"host{self.n_started}", 1, f"10.0.0.{self.workers.index(worker)}:99")
        return worker, lambda: place

    def register(self, worker, distributed=None):
        self.joined.append(distributed)
        return super().register(worker)


def in_pairs(cluster, **options):
    return WorkerGroups(cluster, n_hosts=2, distributed=DISTRIBUTED, **options)


def test_ray_and_groups_implement_the_protocols():
    assert isinstance(in_pairs(Pairs()), Actors)
    assert issubclass(RayActors, GroupActors) and issubclass(RayActors, Actors)


@pytest.mark.parametrize("seed", range(3))
def test_a_lost_process_ends_its_worker_and_no_token_is_lost_or_doubled(seed):
    cluster, lines, found = Pairs(seed, room=6), [], {}
    pool = make_pool(in_pairs(cluster), lines=lines)
    pool.warmup(weights(0))
    numbers = [pool.submit(request(i)) for i in range(20)]
    collect(pool, found, 0, each=lambda round_: cluster.fail(round_) if round_ % 4 == 0 else None)
    assert found == {number: list(range(LENGTH)) for number in numbers}
    n_lost = sum("was lost: killed, of host" in line for line in lines)
    assert n_lost == len(cluster.released) >= 2
    assert len(cluster.workers) % 2 == 0  # the other process of the worker ended with it
    pool.close()
    assert not cluster.workers and len(cluster.released) == len(cluster.groups)


def test_the_processes_join_at_an_address_of_the_first():
    cluster = Pairs(room=2)
    make_pool(in_pairs(cluster), n_workers=1, max_workers=1).warmup(weights(0))
    assert [one.process_id for one in cluster.joined] == [0, 1]
    for one in cluster.joined:
        assert one.start == "on" and one.coordinator == "10.0.0.0:99"
        assert one.num_processes == 2 and one.heartbeat_timeout_s == 7
    cluster = Pairs(room=2)
    pairs = in_pairs(cluster, detects_hosts=True)
    make_pool(pairs, n_workers=1, max_workers=1).warmup(weights(0))
    assert cluster.joined == [dataclasses.replace(DISTRIBUTED, start="on")] * 2


def test_a_worker_is_refused_if_one_of_its_hosts_is():
    cluster = Pairs(room=2, refused=1)
    with pytest.raises(NoWorkers, match="refused: host: source code"):
        make_pool(in_pairs(cluster), n_workers=1, max_workers=1).warmup(weights(0))
    assert not cluster.workers and len(cluster.released) == 1


def test_an_error_waits_for_the_loss_that_may_have_caused_it(monkeypatch):
    """The collective of a process fails before the loss of the other one is known."""

    def fail():
        raise RuntimeError("connection closed by peer")

    cluster = Pairs(room=2)
    pairs = in_pairs(cluster)
    group = pairs.start()
    second = group.processes[1]
    monkeypatch.setattr(cluster, "finished", lambda calls, timeout_s: calls[:1])
    monkeypatch.setattr(cluster, "dispatch", lambda worker, work: (worker, fail))
    call = pairs.dispatch(group, NOTHING)
    assert pairs.finished([call], 0.0) == []
    second.alive = False
    assert pairs.finished([call], 0.0) == [call]
    with pytest.raises(WorkerLost, match="killed, of host 2 of its 2"):
        pairs.result(call)
    second.alive = True
    call = pairs.dispatch(group, NOTHING)
    assert pairs.finished([call], 0.0) == []
    later = time.monotonic() + groups_module.ERROR_GRACE_S + 1.0
    monkeypatch.setattr(groups_module.time, "monotonic", lambda: later)
    monkeypatch.setattr(cluster, "finished", lambda calls, timeout_s: [])
    assert pairs.finished([call], 0.0) == [call]
    with pytest.raises(RuntimeError, match="connection closed"):
        pairs.result(call)


# ---- real engines

MODEL = uniform_decoder("llama", L=2, D=32, N=4, K=2, H=8, F=32, V=64, tied=True, max_len=64)


@pytest.fixture
def run_config():
    """A tiny engine over two devices, with dispatches of three tokens."""
    cfg = RunConfig()
    rollout = dataclasses.replace(
        SMALL, max_num_seqs=2, max_num_batched_tokens=64, steps_per_dispatch=3, tensor=2
    )
    data = dataclasses.replace(cfg.data, max_prompt_len=16, max_response_len=32)
    schedule = dataclasses.replace(cfg.schedule, weight_transfer="delta")
    return dataclasses.replace(cfg, rollout=rollout, data=data, schedule=schedule)


def generated(cfg, make_actors, on_dispatch=lambda actors: None):
    """(tokens and logprobs of responses under two versions of weights, lines of the pool).

    `on_dispatch` is called after the first tokens under the second version.
    """
    dtype, mesh = jnp.dtype("float32"), make_mesh(jax.local_devices()[:1])
    layout = worker_layout(cfg, MODEL, dtype, mesh)
    remote = RemoteWeights(layout, lambda shard: shard, delta=True)
    digest = model_digest(layout.abstract_weights(MODEL, mesh))
    actors, lines, found = make_actors(WorkerSettings(cfg, MODEL, dtype, (), "cpu", digest)), [], {}
    with jax.set_mesh(mesh):
        params = init_model(MODEL, seed=0, rules=TRAIN, dtype=dtype)
        later = jax.tree.map(lambda array: 1.1 * array, params)
        pool = WorkerPool(actors, n_workers=1, max_workers=1, timeout_s=200.0, report=lines.append)
        try:
            pool.warmup(remote.send(params))
            for number, tree in enumerate((params, later)):
                version, called = remote.send(tree), False
                pool.set_version(number)
                for i in range(5):
                    tokens = np.arange(3 + i, dtype=np.int32)
                    pool.submit(Request(tokens=tokens, max_tokens=10 + i, prompt_id=i, seed=7))
                while pool.n_unfinished:
                    for one in pool.generate(version):
                        found.setdefault(one.slot, []).append((one.tokens, one.logp))
                        if number and not called:
                            called = True
                            on_dispatch(actors)
        finally:
            pool.close()
    return {
        slot: [np.concatenate(a) for a in zip(*parts, strict=True)] for slot, parts in found.items()
    }, lines


@pytest.mark.thorough
def test_two_processes_sample_what_one_with_their_devices_does_and_one_is_killed(run_config):
    """The engine is over two devices, with matrices that are sharded over them."""
    expected, _ = generated(run_config, lambda settings: ProcessActors(settings, n_devices=2))
    processes = []

    def pairs(settings):
        processes.append(ProcessActors(settings, n_devices=1))
        return in_pairs(processes[0])

    def kill_second(actors):
        second = list(processes[0].processes.values())[1]
        second.kill()

    found, lines = generated(run_config, pairs, kill_second)
    assert [line.partition(" on ")[0] for line in lines if "joined" in line] == [
        "rollout worker"
    ] * 2
    assert sum("was lost" in line and "host 2 of its 2" in line for line in lines) == 1
    assert not processes[0].processes
    assert len(found) == 10 and found.keys() == expected.keys()
    for slot, (tokens, logp) in expected.items():
        np.testing.assert_array_equal(found[slot][0], tokens)
        np.testing.assert_array_equal(found[slot][1], logp)
        assert len(tokens) == 10 + slot % 5
