"""Tests of jaxrl/rollout/loop.py: episodes that outlive weight updates."""

import time

import numpy as np
import pytest

from jaxrl.config import resolve
from jaxrl.config.keys import EnvConfig, SamplingConfig
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.rollout.loop import RolloutLoop
from jaxrl.rollout.multi_turn import EnvironmentRunner, EpisodeLimits
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.train import train
from jaxrl.types import Prompt
from tests.trainer.schedule.test_source import partial, separate, trained
from tests.trainer.test_multi_turn import EOS, Scripted, ids, run_script
from tests.trainer.test_train import assert_same_weights, metrics

SCRIPT = [["abcde<|im_end|>", "d<|im_end|>"], ["d<|im_end|>"]]


class Continuing(Scripted):
    """Continues a turn that was taken out of it after the tokens that the request has."""

    def __init__(self, script):
        super().__init__(script)
        self.turns, self.version = {}, -1

    def set_version(self, version):
        self.version = version

    def submit(self, request):
        for before, turn in self.turns.get(request.sample, ()):
            n = len(request.tokens) - before
            if 0 < n < len(turn) and request.tokens[before:].tolist() == turn[:n]:
                self.requests.append(request)
                self.left[len(self.requests)] = turn[n:]
                return len(self.requests)
        slot = super().submit(request)
        turns = self.turns.setdefault(request.sample, [])
        turns.append((len(request.tokens), list(self.left[slot])))
        return slot


@pytest.fixture
def group(renderer):
    message = {"role": "user", "content": "hi"}
    prompt = Prompt(5, (message,), renderer.render([message]), "")
    return PromptGroup(prompt, seed=3, draw=0, index=0)


def make_loop(renderer, pool):
    engine = Continuing([[ids(renderer, turn) for turn in turns] for turns in SCRIPT])
    limits = EpisodeLimits(prompt_len=99, max_tokens=200, max_turns=4)
    runner = EnvironmentRunner(
        engine, pool, renderer, (EOS,), sampling=SamplingConfig(), limits=limits
    )
    return RolloutLoop(runner, n=len(SCRIPT))


def start(loop):
    """Returns once all episodes have a turn in the engine."""
    loop.runner.start_waiting()
    while len(loop.turns.in_engine) < len(SCRIPT):
        loop.runner.poll(idle=True)


def finish(loop, group):
    """Runs the loop until the group is complete."""
    for _ in range(1000):
        if group in loop.dispatch(None):
            return group.rollouts
    raise AssertionError("the group does not end")


def test_a_turn_continues_under_new_weights_with_the_tokens_that_it_has(echo, renderer, group):
    loop = make_loop(renderer, echo)
    loop.resume(0, [group])
    start(loop)
    for turn in loop.turns.dispatch(None):
        loop.runner.after_turn(turn)
    n_before = [len(turn.response.tokens) for turn in loop.turns.in_engine.values()]
    assert n_before == [2]
    loop.release()
    assert not loop.engine.left and loop.n_unfinished == 2 and group.rollouts is None
    loop.resume(1, [group])
    assert loop.engine.version == 1
    rollouts = finish(loop, group)
    want, _ = run_script(SCRIPT, echo, renderer)
    for one, alone in zip(rollouts, want, strict=True):
        np.testing.assert_array_equal(one.tokens, alone.tokens)
        np.testing.assert_array_equal(one.loss_mask, alone.loss_mask)
        assert one.episode == alone.episode and one.finish == alone.finish == "stop"
    assert loop.n_unfinished == 0 and echo.n_free == 3 and not loop.engine.left
    assert loop.take_metrics()["time/env_s"] > 0 == loop.take_metrics()["time/env_s"]


@pytest.mark.parametrize("started", [False, True])
def test_groups_that_are_dropped_end_at_once(echo, renderer, group, started):
    loop = make_loop(renderer, echo)
    loop.resume(0, [group])
    if started:
        start(loop)
    loop.resume(1, [])
    assert loop.n_unfinished == 0 and loop.dispatch(None) == [] and not loop.engine.left
    assert group.rollouts is None and echo.n_free == 3


def test_time_limits_leave_out_the_time_of_training(environments, renderer, group, monkeypatch):
    """Results of environments are not collected while a step trains."""
    cfg = EnvConfig(name=f"{environments}:Echo", workers=3, timeout_s=60.0)
    with EnvironmentPool(cfg) as pool:
        loop = make_loop(renderer, pool)
        loop.resume(0, [group])
        loop.dispatch(None)  # resets are under way
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + 100.0)  # training
        loop.resume(1, [group])
        rollouts = finish(loop, group)
    assert [r.episode.error for r in rollouts] == ["", ""]


RUNS = {"partial": partial, "async": separate}


@pytest.mark.thorough
@pytest.mark.bitwise
@pytest.mark.parametrize("mode", ["async", pytest.param("partial", marks=pytest.mark.slow)])
def test_without_staleness_episodes_give_the_weights_of_sync(mode, env_config, tmp_path):
    assert train(resolve(env_config))
    folder = RUNS[mode](env_config, tmp_path, mode, max_staleness=0)
    assert_same_weights(tmp_path / "run", folder)
    losses = [[line["loss/total"] for line in trained(f)] for f in (tmp_path / "run", folder)]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "partial"])
@pytest.mark.parametrize("kind", ["environment", "agent"])
def test_episodes_in_flight_begin_again_in_a_resumed_run(mode, kind, request, tmp_path):
    config = request.getfixturevalue({"environment": "env_config", "agent": "agent_config"}[kind])
    config.data.prompts_per_step = config.rollout.n = 2
    config.rollout.steps_per_dispatch, config.rollout.max_num_seqs = 2, 4
    config.env.workers, config.eval.every = 3, 1
    config.total_steps = 3
    RUNS[mode](config, tmp_path, "resumed", max_staleness=2)
    config.total_steps = 6
    lines = metrics(RUNS[mode](config, tmp_path, "resumed"))
    steps = [line for line in lines if "optim/grad_norm" in line]
    assert len(steps) == 6 and sum("val/reward" in line for line in lines) >= 6
    assert all(line["buffer/dropped"] == 0 for line in steps)
    assert 0 < max(line["staleness/max"] for line in steps) <= 2
    if kind == "environment":  # an agent fails if its context is exceeded; its turns are short
        assert all(line["env/failures"] == 0 for line in steps)
        assert max(line["rollout/versions_per_response"] for line in steps) > 1
    assert max(line["mismatch/logp_diff_max"] for line in steps[:1]) < 1e-4
