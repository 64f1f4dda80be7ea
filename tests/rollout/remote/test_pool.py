"""Tests of jaxrl/rollout/remote/pool.py, on workers in this process that fail at random."""

import dataclasses

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxrl.engine.api import EngineStats, Generated, Request
from jaxrl.rollout.remote import pool as pool_module
from jaxrl.rollout.remote.actors import WorkerLost
from jaxrl.rollout.remote.pool import NoWorkers, WorkerPool
from jaxrl.rollout.remote.weights import Version
from jaxrl.rollout.remote.work import Location, Registration, Work, WorkDone
from jaxrl.runtime.versions import SOURCE

LENGTH = 9  # tokens of a response, two per dispatch


def weights(number):
    """A published version without arrays."""
    return Version(number, [], (), lambda pieces: 0)


class Worker:
    """Generates the positions 0, 1, ... of each request, with the version of its weights."""

    def __init__(self, capacity):
        self.capacity, self.running, self.loaded, self.alive = capacity, {}, None, True
        self.most, self.hangs = 0, False

    def dispatch(self, work: Work) -> WorkDone:
        for number in work.free:
            self.running.pop(number, None)
        if work.update is not None:
            self.loaded = work.update.number
        self.running |= {n: [r, len(r.tokens) - 1] for n, r in work.submit}
        self.most = max(self.most, len(self.running))
        done = [(number, self.advance(number, work.version)) for number in list(self.running)]
        return WorkDone(
            tuple(done), EngineStats(n_steps=2, n_tokens=sum(len(g.tokens) for _, g in done))
        )

    def advance(self, number, version):
        assert version == self.loaded
        request, n = self.running[number]
        tokens = np.arange(n, min(n + 2, n + request.max_tokens), dtype=np.int32)
        left = request.max_tokens - len(tokens)
        self.running[number] = [dataclasses.replace(request, max_tokens=left), n + len(tokens)]
        if not left:
            del self.running[number]
        logp = tokens.astype(np.float32)
        return Generated(0, tokens, logp, logp, "" if left else "length", version=version)


class Cluster:
    """Implements Actors: a call is a function that runs when its result is taken."""

    def __init__(self, seed=0, room=3, refused=0, capacity=4):
        self.random, self.room, self.refused = np.random.default_rng(seed), room, refused
        self.capacity, self.workers, self.n_started = capacity, [], 0

    def start(self):
        self.n_started += 1
        self.workers.append(Worker(self.capacity))
        return self.workers[-1]

    def locate(self, worker):
        return worker, lambda: Location("host", 1)

    def register(self, worker):
        def register():
            if self.refused:
                self.refused -= 1
                return Registration(refused=f"host: {SOURCE} differs")
            return Registration(worker.capacity)

        return worker, register

    def dispatch(self, worker, work):
        return worker, lambda: worker.dispatch(work)

    def finished(self, calls, timeout_s):
        placed = self.workers[: self.room]
        ended = [call for call in calls if call[0] in placed and not call[0].hangs]
        return [call for call in ended if self.random.random() < 0.7]

    def result(self, call):
        worker, run = call
        if not worker.alive:
            raise WorkerLost("killed")
        return run()

    def kill(self, worker):
        worker.alive = False
        self.workers.remove(worker)

    def fail(self, index):
        if self.workers:
            self.workers[index % len(self.workers)].alive = False


def make_pool(cluster, n_workers=2, max_workers=3, timeout_s=60.0, lines=None):
    return WorkerPool(
        cluster,
        n_workers=n_workers,
        max_workers=max_workers,
        timeout_s=timeout_s,
        report=[].append if lines is None else lines.append,
    )


def request(i):
    return Request(tokens=np.zeros(1, np.int32), max_tokens=LENGTH, prompt_id=i)


def collect(pool, found, version, n_rounds=500, each=lambda round_: None):
    """Generates until all requests have ended."""
    for round_ in range(n_rounds):
        for one in pool.generate(weights(version)):
            found.setdefault(one.slot, []).extend(one.tokens.tolist())
        if not pool.n_unfinished:
            return
        each(round_)
    raise AssertionError("deadlock")


@pytest.fixture(autouse=True)
def without_delays(monkeypatch):
    monkeypatch.setattr(pool_module, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(pool_module, "POLL_S", 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_requests_of_killed_workers_continue_and_no_token_is_lost_or_doubled(seed):
    cluster, lines, found = Cluster(seed), [], {}
    pool = make_pool(cluster, lines=lines)
    pool.warmup(weights(0))
    numbers = [pool.submit(request(i)) for i in range(20)]
    collect(pool, found, 0, each=lambda round_: cluster.fail(round_) if round_ % 4 == 0 else None)
    assert found == {number: list(range(LENGTH)) for number in numbers}
    n_lost = sum("was lost: killed" in line for line in lines)
    assert n_lost >= 2 and pool.take_metrics()["workers/lost"] == n_lost
    assert cluster.n_started >= 3 + n_lost - 1  # each one came back


def test_work_is_distributed_equally_and_a_late_worker_gets_its_share():
    cluster = Cluster(room=2)
    pool, found = make_pool(cluster, n_workers=2, max_workers=3), {}
    pool.warmup(weights(0))
    for i in range(4):
        pool.submit(request(i))
    collect(pool, found, 0)
    assert [worker.most for worker in cluster.workers] == [2, 2, 0]
    cluster.room = 3
    for i in range(12):
        pool.submit(request(i))
    collect(pool, found, 0)
    assert cluster.workers[2].most == 4 and pool.n_ready == 3
    assert all(tokens == list(range(LENGTH)) for tokens in found.values())


def test_new_weights_are_loaded_between_two_dispatches_and_freed_requests_send_nothing():
    cluster = Cluster()
    pool, found = make_pool(cluster, max_workers=2), {}
    pool.warmup(weights(0))
    kept, freed, queued = (pool.submit(request(i)) for i in range(3))
    pool.generate(weights(0))
    pool.free(freed)
    for _ in range(3):
        pool.generate(weights(0))
    pool.set_version(1)
    pool.free(queued)
    collect(pool, found, 1)
    assert freed not in found and set(found) <= {kept, queued}
    assert all(worker.loaded == 1 for worker in cluster.workers if worker.running)
    with pytest.raises(KeyError):
        pool.free(freed)


def test_a_worker_with_other_code_is_refused_and_the_others_work():
    cluster, lines, found = Cluster(refused=1), [], {}
    pool = make_pool(cluster, lines=lines)
    pool.warmup(weights(0))
    pool.submit(request(0))
    collect(pool, found, 0)
    assert any("refused: host: source code of jaxrl differs" in line for line in lines)
    assert len(cluster.workers) == 2


def test_a_run_whose_workers_are_all_refused_ends_with_the_reason():
    with pytest.raises(NoWorkers, match=r"refused: host: source code.*install the trainer's"):
        make_pool(Cluster(refused=9)).warmup(weights(0))


def test_a_run_without_workers_ends_after_the_timeout():
    with pytest.raises(NoWorkers, match=r"0 of 2 .*worker_timeout_s=0.01; no host.*ray start"):
        make_pool(Cluster(room=0), timeout_s=0.01).warmup(weights(0))


def test_workers_that_do_not_answer_are_started_again():
    cluster, found, lines = Cluster(), {}, []
    pool = make_pool(cluster, n_workers=1, max_workers=1, lines=lines)
    pool.warmup(weights(0))
    pool.submit(request(0))
    cluster.room = 0
    pool.generate(weights(0))
    pool._timeout_s = 0.0
    pool.generate(weights(0))
    cluster.room, pool._timeout_s = 3, 60.0
    collect(pool, found, 0)
    assert list(found.values()) == [list(range(LENGTH))]
    assert any("did not answer for 0 s; 1 requests continue" in line for line in lines)


def test_a_worker_that_hangs_while_it_starts_is_started_again():
    cluster, lines = Cluster(room=2), []
    pool = make_pool(cluster, n_workers=1, max_workers=3, lines=lines)
    while not all(member.location for member in pool._members[:2]) or not pool._members:
        pool._poll(weights(0), 1)
    hung = cluster.workers[0]
    hung.hangs = True
    pool.warmup(weights(0))
    pool._timeout_s = 0.0
    pool.generate(weights(0))
    pool._timeout_s = 60.0
    assert lines[-1].startswith("a rollout worker on host (process 1) was lost: it did not answer")
    assert hung not in cluster.workers and pool.n_ready == 1
    cluster.room = 3
    pool._n_workers = 3
    assert pool.warmup(weights(0)) == 3
    assert cluster.n_started == 4  # the one that had no host was kept


def test_an_error_that_every_worker_has_ends_the_run(monkeypatch):
    def fail(self, work):
        raise RuntimeError("out of memory")

    pool = make_pool(Cluster())
    pool.warmup(weights(0))
    monkeypatch.setattr(Worker, "dispatch", fail)
    pool.submit(request(0))
    with pytest.raises(RuntimeError, match="out of memory"):
        collect(pool, {}, 0)


@settings(derandomize=True, deadline=None, max_examples=20, phases=[Phase.generate])
@given(st.data())
def test_random_losses_rooms_and_versions(data):
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    cluster, found = Cluster(draw(*range(20)), draw(2, 3), capacity=draw(1, 3)), {}
    pool = make_pool(cluster)
    pool.warmup(weights(0))
    for version in range(3):
        pool.set_version(version)
        numbers = [pool.submit(request(i)) for i in range(draw(0, 1, 7))]
        every = draw(7, 11, 1000)
        cluster.room = max(cluster.room, draw(2, 3))
        if numbers:
            collect(pool, found, version, each=lambda r, n=every: (r + 1) % n or cluster.fail(r))
        assert all(found[number] == list(range(LENGTH)) for number in numbers)
