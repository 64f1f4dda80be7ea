"""Tests of jaxrl/trainer/schedule/generator.py, and of rollout (loop, schedule).

Random schedules on a toy engine: lengths, numbers of slots, slow rewards, kills.
"""

import dataclasses
import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.keys import RunConfig
from jaxrl.data.iterator import BatchIterator
from jaxrl.engine.api import EngineStats, Generated
from jaxrl.rollout.loop import RolloutLoop, SingleTurnRunner, sampled_requests
from jaxrl.trainer.schedule.generator import GroupGenerator
from jaxrl.types import Prompt, Reward

N_PROMPTS = 11
PROMPTS = [Prompt(i, (), np.arange(3, dtype=np.int32), answer="") for i in range(N_PROMPTS)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One random schedule."""

    prompts_per_step: int
    n: int
    max_staleness: int
    oversample: float
    order: str
    keep_kv: bool
    n_slots: int
    steps_per_dispatch: int
    longest: int
    seed: int
    kills: frozenset[int]  # steps before which the process is killed and resumed
    n_workers: int = 0  # rollout workers, which share the engine of a process


@st.composite
def cases(draw):
    staleness = draw(st.integers(0, 3))
    return Case(
        prompts_per_step=draw(st.integers(1, 4)),
        n=draw(st.integers(1, 3)),
        max_staleness=staleness,
        oversample=draw(st.sampled_from([0.0, 1.0, 1 + staleness / 2])),
        order=draw(st.sampled_from(["prompt", "arrival"])),
        keep_kv=draw(st.booleans()),
        n_slots=draw(st.integers(1, 20)),
        steps_per_dispatch=draw(st.integers(1, 9)),
        longest=draw(st.integers(1, 60)),
        seed=draw(st.integers(0, 2**16)),
        kills=draw(st.frozensets(st.integers(1, 7), max_size=3)),
    )


class ToyEngine:
    """Responses of random lengths; a token tells its position and the version of the weights."""

    def __init__(self, case: Case):
        self.case, self.version, self.slots, self.n_submitted = case, 0, {}, 0

    def set_version(self, version):
        self.version = version

    def prefill(self, params, tokens): ...

    def release_prefix(self, prefix): ...

    def insert(self, prefix, request): ...

    def take_stats(self):
        return EngineStats()

    @property
    def n_unfinished(self):
        return len(self.slots)

    def submit(self, request):
        self.slots[self.n_submitted] = [request, len(request.tokens)]
        self.n_submitted += 1
        return self.n_submitted - 1

    def free(self, slot):
        del self.slots[slot]

    def generate(self, params):
        assert params == self.version
        return [self.advance(slot) for slot in list(self.slots)[: self.case.n_slots]]

    def advance(self, slot):
        request, n = self.slots[slot]
        entropy = (self.case.seed, request.seed, request.prompt_id, request.sample)
        length = 1 + hash(entropy) % self.case.longest  # hashes of integers have no random seed
        end = min(n + self.case.steps_per_dispatch, 3 + length)
        tokens = np.arange(n - 3, end - 3, dtype=np.int32)
        self.slots[slot][1] = end
        finish = "stop" if end == 3 + length else ""
        if finish:
            del self.slots[slot]
        logp = -tokens.astype(np.float32)
        return Generated(slot, tokens, logp, logp, finish, version=self.version)


class SlowRewards:
    """Rewards that are known after a random number of looks."""

    def __init__(self, seed: int):
        self.random, self.pending, self.n = np.random.default_rng(seed), {}, 0

    def submit(self, rollouts):
        self.n += 1
        self.pending[self.n] = [self.random.integers(0, 6), rollouts]
        return self.n

    def collect(self, *, wait):
        for entry in self.pending.values():
            entry[0] -= 1
        done = [ticket for ticket, (left, _) in self.pending.items() if left < 0]
        found = {ticket: self.pending.pop(ticket)[1] for ticket in done}
        return {t: [Reward(float(len(r.tokens))) for r in rs] for t, rs in found.items()}


def make_generator(case: Case, seed: int, mode: str = "partial") -> GroupGenerator:
    cfg = RunConfig()
    schedule = dataclasses.replace(
        cfg.schedule,
        mode=mode,
        rollout_workers=case.n_workers,
        **{k: getattr(case, k) for k in ("max_staleness", "oversample", "order", "keep_kv")},
    )
    cfg = dataclasses.replace(
        cfg,
        schedule=schedule,
        data=dataclasses.replace(
            cfg.data, prompts_per_step=case.prompts_per_step, max_response_len=case.longest
        ),
        rollout=dataclasses.replace(cfg.rollout, n=case.n),
    )
    iterator = BatchIterator(
        PROMPTS, prompts_per_step=case.prompts_per_step, shuffle=True, seed=case.seed
    )
    make_request = sampled_requests(cfg.rollout.sampling, case.longest)
    runner = SingleTurnRunner(ToyEngine(case), make_request, lambda tokens: "")
    loop = RolloutLoop(runner, n=case.n, keep_kv=case.keep_kv)
    return GroupGenerator(cfg, loop, SlowRewards(seed), iterator)


def run(case: Case, n_steps: int, kills=frozenset()):
    """The batches of a run: per step and response the prompt, the seed, tokens and versions."""
    generator, steps = make_generator(case, case.seed), []
    snapshot = generator.snapshot()
    for step in range(n_steps):
        if step in kills:
            saved = json.loads(json.dumps(snapshot.json()))
            generator = make_generator(case, case.seed + step)
            generator.restore([saved])
        if kills or case.keep_kv:  # checkpoints
            generator.loop.release()
        generator.begin(step, step)
        patience = functools.partial(next, iter(range(10_000)))  # ends a deadlock with an error
        batch = generator.generate(step, step, patience)
        generator.wait_for_rewards(batch, patience)
        steps.append(
            [
                (g.prompt.id, g.seed, r.sample, tuple(r.tokens), tuple(r.versions), reward.value)
                for g in batch
                for r, reward in zip(g.responses, g.rewards, strict=True)
            ]
        )
        snapshot = generator.snapshot()
    return steps


def check(case: Case, steps) -> None:
    responses = [r for step in steps for r in step]
    assert all(len(step) == case.prompts_per_step * case.n for step in steps)
    assert len({r[:3] for r in responses}) == len(responses)  # no group twice
    for number, step in enumerate(steps):
        for _, _, _, tokens, versions, reward in step:
            assert tokens == tuple(range(len(tokens))) and reward == len(tokens)
            assert len(versions) == len(tokens) and list(versions) == sorted(versions)
            assert number - versions[0] <= case.max_staleness and versions[-1] <= number


def drawn(case: Case, n_steps: int) -> list[list[int]]:
    iterator = make_generator(case, 0).iterator
    return [[prompt.id for prompt in next(iterator)] for _ in range(n_steps)]


def check_schedule(case: Case) -> None:
    steps = run(case, 8)
    check(case, steps)
    resumed = run(case, 8, case.kills)
    check(case, resumed)
    if case.order == "prompt":
        assert [[r[0] for r in step[:: case.n]] for step in steps] == drawn(case, 8)
        assert resumed == steps


CASE = Case(2, 2, 1, 0.0, "prompt", False, 4, 3, 30, 0, frozenset())


def test_what_was_in_flight_does_not_change_when_it_is_written_later():
    generator = make_generator(CASE, 0)
    generator.begin(0, 0)
    generator.generate(0, 0, lambda: None)
    snapshot = generator.snapshot()
    expected = json.dumps(snapshot.json())
    generator.begin(1, 1)  # starts further groups
    generator.generate(1, 1, lambda: None)
    assert json.dumps(snapshot.json()) == expected


def test_groups_are_scored_while_others_are_generated():
    generator, running = make_generator(CASE, 0), []
    submit = generator.rewards.submit

    def watched(rollouts):
        running.append(generator.loop.n_unfinished)
        return submit(rollouts)

    generator.rewards.submit = watched
    generator.begin(0, 0)
    generator.generate(0, 0, lambda: None)
    assert len(running) >= 2 and running[0] > 0


def test_a_reward_that_hangs_delays_only_the_batch_of_its_group():
    generator = make_generator(dataclasses.replace(CASE, order="arrival"), 0)
    hung, collect = [], generator.rewards.collect

    def never(*, wait):
        found = collect(wait=wait)
        if not hung and found:
            hung.append(min(found))
        return {ticket: rewards for ticket, rewards in found.items() if ticket not in hung}

    generator.rewards.collect = never
    generator.begin(0, 0)
    patience = functools.partial(next, iter(range(1000)))
    batch = generator.generate(0, 0, patience)
    assert hung and all(group.rewards is not None for group in batch)


@pytest.mark.parametrize("keep_kv", [False, True])
def test_groups_that_no_step_could_train_on_in_time_are_dropped_and_counted(keep_kv):
    generator = make_generator(dataclasses.replace(CASE, keep_kv=keep_kv), 0)
    generator.begin(0, 0)
    generator.generate(0, 0, lambda: None)
    generator.begin(2, 2)  # a step was left out
    assert generator.take_metrics() == {"buffer/size": 4.0, "buffer/dropped": 2.0}
    assert all(group.version == 2 for group in generator.buffer.started)
    batch = generator.generate(2, 2, lambda: None)
    assert [group.draw for group in batch] == [2, 2]  # draws 0 and 1 were taken and dropped


def test_kept_kv_leaves_responses_in_the_engine():
    kept, released = (
        make_generator(dataclasses.replace(CASE, keep_kv=keep), 0) for keep in (True, False)
    )
    for generator in (kept, released):
        generator.begin(0, 0)
        generator.generate(0, 0, lambda: None)
        generator.n_before = generator.loop.engine.n_submitted
        generator.begin(1, 1)
    n_new = 2 * CASE.n  # two further prompts
    assert kept.loop.engine.n_submitted == kept.n_before + n_new
    assert released.loop.engine.n_submitted > released.n_before + n_new


@settings(derandomize=True, deadline=None, max_examples=12)
@given(cases())
def test_random_schedules_lose_nothing_keep_their_bounds_and_resume_exactly(case):
    check_schedule(case)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=1000)
@given(cases())
def test_a_thousand_random_schedules(case):
    check_schedule(case)
