"""Throughput of the pool with Ray actors whose engine only waits, so that all fit on one core."""

import importlib.util
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.engine.api import EngineStats, Generated, Request
from jaxrl.models.config import uniform_decoder
from jaxrl.rollout.remote import actors
from jaxrl.rollout.remote.pool import WorkerPool
from jaxrl.rollout.remote.weights import Version
from jaxrl.rollout.remote.work import Location, Registration, WorkDone, WorkerSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
]
DISPATCH_S, DISPATCH_LEN, CAPACITY, LENGTH = 0.5, 8, 4, 64


class WaitingWorker:
    """In place of RolloutWorker: a dispatch sleeps, and samples DISPATCH_LEN zeros per request."""

    def __init__(self, get, host_ip):
        self.left = {}

    def locate(self):
        return Location("host", 1)

    def register(self, expected, settings, distributed):
        return Registration(CAPACITY)

    def dispatch(self, work):
        for number in work.free:
            self.left.pop(number, None)
        self.left |= {number: request.max_tokens for number, request in work.submit}
        time.sleep(DISPATCH_S)
        done = tuple((number, self.advance(number, work.version)) for number in list(self.left))
        return WorkDone(done, EngineStats(n_tokens=DISPATCH_LEN * len(done)))

    def advance(self, number, version):
        self.left[number] -= DISPATCH_LEN
        finish = "" if self.left[number] else "length"
        if finish:
            del self.left[number]
        tokens = np.zeros(DISPATCH_LEN, np.int32)
        logp = np.zeros(DISPATCH_LEN, np.float32)
        return Generated(0, tokens, logp, logp, finish, version=version)


class Load:
    """Keeps as many requests in flight as three workers decode, and counts tokens."""

    def __init__(self, pool):
        self.pool, self.n_tokens, self.weights = pool, 0, Version(0, [], (), lambda pieces: 0)

    def generate(self, until):
        while not until():
            while self.pool.n_unfinished < 3 * CAPACITY:
                self.pool.submit(Request(tokens=np.zeros(1, np.int32), max_tokens=LENGTH))
            self.n_tokens += sum(len(one.tokens) for one in self.pool.generate(self.weights))

    def tokens_per_s(self, seconds):
        before, start = self.n_tokens, time.monotonic()
        self.generate(lambda: time.monotonic() - start >= seconds)
        return (self.n_tokens - before) / (time.monotonic() - start)


@pytest.fixture
def cluster(monkeypatch):
    """A local Ray cluster with room for two actors, to which this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    here = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=here.address, log_to_driver=False)
    yield here
    ray.shutdown()
    here.shutdown()


def test_a_third_worker_on_a_new_host_raises_throughput_by_half(cluster, monkeypatch):
    import ray

    monkeypatch.setattr(actors, "RolloutWorker", WaitingWorker)
    decoder = uniform_decoder("llama", L=1, D=16, N=2, K=1, H=8, F=16, V=64, tied=True, max_len=64)
    settings = WorkerSettings(RunConfig(), decoder, jnp.dtype("float32"), (), "cpu", "")
    workers = actors.RayActors(ray, settings, {"CPU": 1}, {})
    pool = WorkerPool(workers, n_workers=2, max_workers=3, timeout_s=300.0)
    load = Load(pool)
    try:
        pool.warmup(load.weights)
        load.tokens_per_s(2 * DISPATCH_S)
        two = load.tokens_per_s(20 * DISPATCH_S)
        assert pool.n_ready == 2
        cluster.add_node(num_cpus=1)
        added = time.monotonic()
        load.generate(lambda: pool.n_ready == 3)
        joined_s = time.monotonic() - added
        load.tokens_per_s(2 * DISPATCH_S)
        three = load.tokens_per_s(20 * DISPATCH_S)
    finally:
        pool.close()
    most = 3 * CAPACITY * DISPATCH_LEN / DISPATCH_S
    print(f"tokens/s: {two:.1f} with 2 workers, {three:.1f} with 3 (at most {most:.0f}), ")
    print(f"{three / two:.2f} times, the third was ready {joined_s:.1f} s after its host joined")
    assert three / two == pytest.approx(1.5, rel=0.15)
