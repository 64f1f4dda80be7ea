"""Schedules of several processes, one generator each, on a toy engine."""

import contextlib
import dataclasses
import functools
import json
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl.config import default_config, resolve
from jaxrl.rollout.engines import merge_metrics
from jaxrl.runtime.signals import Interrupted, StopFlag
from jaxrl.trainer.core import Run
from jaxrl.trainer.schedule.source import PartialSource
from jaxrl.trainer.setup.session import check_processes
from sharding import hosts
from tests.trainer.schedule.test_generator import CASE, drawn, make_generator

BATCHES = dataclasses.replace(CASE, prompts_per_step=3, max_staleness=2, oversample=2.5)


@pytest.fixture
def generators(monkeypatch):
    """generators(case, n) are those of `n` processes; `saved` is what was in flight in others."""

    def make(case, n, saved=()):
        found = []
        for i in range(n):
            monkeypatch.setattr(hosts, "n_processes", lambda: n)
            monkeypatch.setattr(hosts, "process_id", lambda i=i: i)
            found.append(make_generator(case, case.seed + i))
            if saved:
                found[-1].restore(saved)
        return found

    return make


def step(generators, number):
    """The batches of a step in all processes, in process order, of (prompt, tokens, versions)."""
    patience = functools.partial(next, iter(range(10_000)))
    groups = []
    for generator in generators:
        generator.begin(number, number)
        groups += generator.generate(number, number, patience)
    return [(g.prompt.id, r.sample, r.tokens, r.versions) for g in groups for r in g.responses]


def in_flight(generators):
    return [json.loads(json.dumps(generator.snapshot().json())) for generator in generators]


def ids(batch):
    return [entry[0] for entry in batch[:: CASE.n]]


@pytest.mark.parametrize("n", [2, 3])
def test_processes_generate_the_slices_of_the_batches_of_one(generators, n):
    processes = generators(BATCHES, n)
    steps = [step(processes, i) for i in range(6)]
    assert [ids(batch) for batch in steps] == drawn(BATCHES, 6)
    assert all(i - entry[3][0] <= 2 for i, batch in enumerate(steps) for entry in batch)
    assert len({p.snapshot().n_draws for p in processes}) == 1
    (one,) = generators(BATCHES, 1)
    for i, batch in enumerate(steps):
        assert [entry[:3] for entry in batch] == [entry[:3] for entry in step([one], i)]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_was_in_flight_in_two_processes_continues_in_others(generators, n):
    before = generators(BATCHES, 2)
    steps = [step(before, i) for i in range(3)]
    saved = in_flight(before)
    resumed = generators(BATCHES, n, saved)
    steps += [step(resumed, i) for i in range(3, 6)]
    assert [ids(batch) for batch in steps] == drawn(BATCHES, 6)
    assert all(i - entry[3][0] <= 2 for i, batch in enumerate(steps) for entry in batch)
    if n == 2:
        unbroken = generators(BATCHES, 2)
        for i, batch in enumerate(steps):
            assert batch == step(unbroken, i)


@pytest.mark.parametrize("n", [1, 2])
def test_prompts_that_only_one_process_had_drawn_are_drawn_again(generators, n):
    """A run that stops at different moments of its processes."""
    before = generators(BATCHES, 2)
    steps = [step(before, i) for i in range(2)]
    before[1].begin(2, 2)
    saved = in_flight(before)
    assert saved[1]["n_draws"] == saved[0]["n_draws"] + 1
    resumed = generators(BATCHES, n, saved)
    steps += [step(resumed, i) for i in range(2, 5)]
    assert [ids(batch) for batch in steps] == drawn(BATCHES, 5)


def test_only_the_first_processes_generate_if_there_are_fewer_workers(generators):
    case = dataclasses.replace(BATCHES, n_workers=2)
    processes = generators(case, 3)
    assert [p.n_processes for p in processes] == [2, 2, 2]
    steps = [step(processes, i) for i in range(3)]
    resumed = generators(case, 3, in_flight(processes)[:2])  # as AsyncSource saves them
    steps += [step(resumed, i) for i in range(3, 6)]
    assert [ids(batch) for batch in steps] == drawn(case, 6)
    pairs = generators(case, 2)
    assert steps == [step(pairs, i) for i in range(6)]


class Threads:
    """Threads in place of processes: `run` gives the result or the error of each."""

    def __init__(self, monkeypatch, n):
        self.n, self.local, self.barrier = n, threading.local(), threading.Barrier(n, timeout=60)
        self.values = [None] * n
        monkeypatch.setattr(hosts, "n_processes", lambda: n)
        monkeypatch.setattr(hosts, "process_id", lambda: self.local.i)
        monkeypatch.setattr(hosts, "gather", self.gather)

    def gather(self, value):
        self.values[self.local.i] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def run(self, function):
        def one(i):
            self.local.i = i
            try:
                return function(i)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.n) as threads:
            return list(threads.map(one, range(self.n)))


def fake_run(engine, step):
    """The parts of a run that PartialSource uses; the weights are the number of the step."""

    def block(value=None):
        return lambda *args, **kwargs: contextlib.nullcontext(value)

    progress = types.SimpleNamespace(phase=block(types.SimpleNamespace(update=lambda n: None)))
    core = types.SimpleNamespace(
        session=types.SimpleNamespace(stop=StopFlag(), progress=progress),
        clock=types.SimpleNamespace(step=step, saved_at=-1, timed=block()),
        state=types.SimpleNamespace(params=step),
        no_compile=block(),
    )
    engines = types.SimpleNamespace(
        engine=engine, layout=types.SimpleNamespace(weights=block(step))
    )
    run = object.__new__(Run)
    vars(run).update(core=core, engines=engines, reward_model=None)
    return run


def test_partial_sources_gather_their_shares_and_stop_together(monkeypatch):
    expected, n_samples = drawn(BATCHES, 4), CASE.n * BATCHES.prompts_per_step
    threads = Threads(monkeypatch, 2)

    def process(i):
        source = PartialSource(make_generator(BATCHES, BATCHES.seed + i))
        engine, found, errors = source.generator.loop.engine, [], []
        for number in range(4):
            run = fake_run(engine, number)
            scored, metrics = source.reward(run, source.rollout(run, 0))
            found.append([one.rollout.prompt.id for one in scored])
            assert metrics["staleness/max"] <= 2 and len(scored) == n_samples
            assert all(one.reward.value == len(one.rollout.tokens) for one in scored)
        saved = source.in_flight()()["processes"]
        for broken in (False, True):  # only in process 1
            run = fake_run(engine, 4)
            if i == 1 and broken:
                monkeypatch.setattr(source.generator, "poll_rewards", lambda wait: int("x"))
            elif i == 1:
                run.core.session.stop.signal = "SIGTERM"
            try:
                source.reward(run, source.rollout(run, 0))
            except (Interrupted, hosts.AgreedError) as error:
                errors.append(error)
            assert not engine.n_unfinished  # free for a save or a validation
        return found, len(saved), [type(error) for error in errors], str(errors[1])

    one, other = threads.run(process)
    assert one == other
    found, n_saved, errors, message = one
    assert [batch[:: CASE.n] for batch in found] == expected
    assert n_saved == 2 and errors == [Interrupted, hosts.AgreedError]
    assert message.startswith("process 1 on") and "invalid literal" in message


def test_metrics_of_processes_are_sums_of_counts_and_means():
    shares = [{"buffer/size": 2.0, "buffer/dropped": 1.0, "buffer/waited_s": 3.0}] * 2
    assert merge_metrics(shares) == {
        "buffer/size": 4.0,
        "buffer/dropped": 2.0,
        "buffer/waited_s": 3.0,
    }


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"schedule.order": "arrival"}, "order='arrival' runs in one process, but there are 2"),
        ({"schedule.mode": "partial", "schedule.order": "arrival"}, "schedule.order='prompt'"),
        ({"schedule.mode": "partial", "rollout.engines": "mesh"}, "rollout.engines='process'"),
        ({"rollout.engines": "mesh"}, "set config.rollout.engines='process'"),
        ({"data.prompts_per_step": 1}, "prompts_per_step=1 is less than the 2 processes"),
    ],
)
def test_what_needs_one_process_is_refused_in_two(monkeypatch, keys, message):
    config = default_config()
    config.model.path, config.data.train = "model", ("task:addition",)
    config.reward.functions = ("math",)
    config.schedule.mode = "async"
    config.update_from_flattened_dict(keys)
    if config.schedule.mode == "async":
        config.schedule.rollout_devices = 1
    run = resolve(config)
    check_processes(run)
    monkeypatch.setattr(hosts, "n_processes", lambda: 2)
    with pytest.raises(hosts.AgreedError, match=message):
        check_processes(run)
