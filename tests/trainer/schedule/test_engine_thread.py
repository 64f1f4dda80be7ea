"""Tests of jaxrl/trainer/schedule/engine_thread.py, on a toy engine."""

import contextlib
import dataclasses
import functools
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings

from jaxrl.runtime.signals import Interrupted
from jaxrl.trainer.schedule.engine_thread import BatchOrder, EngineThread
from jaxrl.types import Reward
from tests.trainer.schedule.test_generator import CASE, Case, cases, drawn, make_generator

ASYNC = dataclasses.replace(CASE, max_staleness=2)


class Trainer:
    """Takes batches as AsyncSource does, and keeps what a checkpoint would have."""

    def __init__(self, case: Case, step: int = 0, saved: dict | None = None):
        self.case, self.step, self.version = case, step, -1
        self.generator = make_generator(case, case.seed + step, "async")
        if saved is not None:
            self.generator.restore([saved])
        self.lag = self.generator.cfg.schedule.lag
        self.thread = EngineThread(self.generator, self.lag, contextlib.nullcontext)
        self.saved_at = step

    def patience(self):
        """Ends a deadlock with an error."""
        return functools.partial(next, iter(range(3000)))

    def take(self, *, ends_step=True):
        while self.thread.n_ahead <= self.lag:
            params = self.step if self.version != self.step else None
            self.version = self.step
            fresh = self.saved_at == self.step
            step = self.step + self.thread.n_ahead
            self.thread.order(BatchOrder(step, self.step, params, fresh))
        groups = self.thread.take(self.patience()).groups
        self.step += ends_step
        return [
            (g.prompt.id, g.seed, r.sample, tuple(r.tokens), tuple(r.versions), reward.value)
            for g in groups
            for r, reward in zip(g.responses, g.rewards, strict=True)
        ]

    def checkpoint(self, check=None) -> dict:
        self.saved_at = self.step
        return json.loads(json.dumps(self.thread.mark()(check or self.patience()).json()))


@contextlib.contextmanager
def trainer(case: Case, step: int = 0, saved: dict | None = None):
    one = Trainer(case, step, saved)
    try:
        yield one
    finally:
        one.thread.close()


def run(case: Case, n_steps: int, kills=frozenset(), saves=frozenset()):
    """The batches of a run with checkpoints before the steps `saves`, killed before `kills`."""
    steps, saved = [], None
    for first, last in zip([0, *sorted(kills)], [*sorted(kills), n_steps], strict=True):
        with trainer(case, first, saved) as one:
            for step in range(first, last):
                if step in saves and step > first:
                    one.checkpoint()
                steps.append(one.take())
            if last < n_steps:
                saved = one.checkpoint()
    return steps


def check(case: Case) -> None:
    kills = frozenset(step for step in case.kills if step < 5)
    steps, resumed = run(case, 6, saves=kills), run(case, 6, kills)
    for found in (steps, resumed):
        responses = [r for step in found for r in step]
        assert len({r[:3] for r in responses}) == len(responses)  # no group twice
        for number, step in enumerate(found):
            assert len(step) == case.prompts_per_step * case.n
            for _, _, _, tokens, versions, reward in step:
                assert tokens == tuple(range(len(tokens))) and reward == len(tokens)
                assert list(versions) == sorted(versions)
                assert number - versions[0] <= case.max_staleness and versions[-1] <= number
    if case.order == "prompt":
        assert resumed == steps


def fit(case: Case) -> Case:
    """The case with no more prompts in flight than async allows."""
    return dataclasses.replace(case, oversample=0.0)


def test_weights_change_between_batches_and_responses_continue_under_them():
    steps = run(ASYNC, 6)
    assert steps == run(ASYNC, 6)
    ages = [number - r[4][0] for number, step in enumerate(steps) for r in step]
    assert max(ages) == 2 and min(ages) >= 0
    assert any(len(set(r[4])) > 1 for step in steps for r in step)


def test_one_step_of_staleness_generates_the_next_batch_with_the_weights_of_this_step():
    steps = run(dataclasses.replace(ASYNC, max_staleness=1), 5)
    versions = [{v for r in step for v in r[4]} for step in steps]
    assert versions == [{0}, {0}, {1}, {2}, {3}]


def test_without_staleness_every_token_is_sampled_by_the_weights_of_its_step():
    steps = run(dataclasses.replace(ASYNC, max_staleness=0), 4)
    assert all({v for r in step for v in r[4]} == {n} for n, step in enumerate(steps))


def test_the_error_of_an_engine_ends_the_wait_and_what_was_in_flight_is_saved():
    with trainer(ASYNC) as one:
        one.take()
        engine = one.generator.loop.engine

        def fail(params):
            raise RuntimeError("the device is gone")

        engine.generate = fail
        with pytest.raises(RuntimeError, match="the device is gone"):
            for _ in range(5):
                one.take()
        saved = one.checkpoint()
    assert saved["groups"]
    with trainer(ASYNC, one.step, saved) as resumed:
        assert resumed.take()


def test_an_interrupted_wait_stops_the_engine_and_saves_what_is_in_flight():
    def interrupted():
        raise Interrupted("SIGINT")

    with trainer(ASYNC) as one:
        one.take()
        engine, generate = one.generator.loop.engine, one.generator.loop.engine.generate
        engine.generate = lambda params: []  # never ends
        one.version = -1  # the next order has weights
        with pytest.raises(Interrupted):
            one.thread.order(BatchOrder(1, 1, 1, False))
            one.thread.hold(interrupted)
        saved = one.checkpoint(interrupted)
        engine.generate = generate
    assert saved["groups"] and not one.thread._thread.is_alive()


def test_a_held_engine_is_free_and_its_responses_continue_with_the_next_order():
    with trainer(ASYNC) as one:
        steps = [one.take()]
        one.thread.hold(one.patience())
        assert not one.generator.loop.turns.in_engine and not one.generator.loop.engine.slots
        steps += [one.take() for _ in range(3)]
    assert steps == run(ASYNC, 4)


def test_further_batches_of_a_step_keep_the_order_of_the_data_and_their_age():
    with trainer(ASYNC) as one:  # dynamic sampling takes two batches per step
        batches = [one.take(ends_step=i % 2 == 1) for i in range(8)]
    ids = [[r[0] for r in batch[:: ASYNC.n]] for batch in batches]
    assert ids == drawn(ASYNC, 8)
    assert len({r[:3] for batch in batches for r in batch}) == 8 * len(batches[0])
    assert all(0 <= i // 2 - r[4][0] <= 2 for i, batch in enumerate(batches) for r in batch)


@settings(derandomize=True, deadline=None, max_examples=4)
@given(cases())
def test_random_schedules_lose_nothing_keep_their_bounds_and_resume_exactly(case):
    check(fit(case))


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=200)
@given(cases())
def test_two_hundred_random_schedules(case):
    check(fit(case))


def test_arrival_order_takes_groups_whose_rewards_are_known():
    with trainer(dataclasses.replace(ASYNC, order="arrival")) as one:
        ids = [r[0] for _ in range(4) for r in one.take()]
    assert len(ids) == 4 * ASYNC.prompts_per_step * ASYNC.n
    assert np.unique(ids).size == 4 * ASYNC.prompts_per_step


class TimedRewards:
    """Rewards of every second group are known after SECONDS."""

    SECONDS = 0.4

    def __init__(self):
        self.pending, self.n_slow = [], 0

    def submit(self, rollouts):
        ticket = len(self.pending)
        slow = ticket % 2
        self.n_slow += slow
        self.pending.append((time.monotonic() + slow * self.SECONDS, rollouts))
        return ticket

    def collect(self, *, wait):
        time.sleep(0.005 * wait)
        ready = [t for t, one in enumerate(self.pending) if one and one[0] <= time.monotonic()]
        found = {t: [Reward(0.0)] * len(self.pending[t][1]) for t in ready}
        for ticket in ready:
            self.pending[ticket] = None
        return found


def test_slow_rewards_are_computed_while_the_trainer_trains():
    """A slow reward takes as long as two steps, and its group may arrive three steps later."""
    case = dataclasses.replace(ASYNC, max_staleness=3, order="arrival")
    with trainer(case) as one:
        one.generator.rewards = rewards = TimedRewards()
        waited_s = 0.0
        for _ in range(8):
            start = time.monotonic()
            one.take()
            waited_s += time.monotonic() - start
            time.sleep(rewards.SECONDS / 2)  # a step
    assert waited_s < 0.5 * rewards.n_slow * rewards.SECONDS
