"""Tests of rollout/loop.py: rollouts of a single turn."""

import dataclasses

import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.rollout.loop import SingleTurnRunner, generate, sampled_requests
from jaxrl.types import Prompt
from tests.engine.engine_cases import make_engine

RNG = np.random.default_rng(0)
PROMPTS = [
    Prompt(id=i, messages=(), tokens=RNG.integers(2, 512, n, dtype=np.int32), answer="")
    for i, n in ((4, 70), (9, 5), (2, 130))
]


def letters(tokens: np.ndarray) -> str:
    return "".join("abcdefghijklmnopqrstuvwxyz"[t % 26] for t in tokens)


def call(engine, params, *, lens=12, ignore_stop=False, sampling=None, **changes):
    """(rollouts, metrics); `lens` is one limit or one per response."""

    def make_request(group, sample):
        n = lens if isinstance(lens, int) else lens[3 * group.index + sample]
        request = sampled_requests(sampling or SamplingConfig(), n)(group, sample)
        return dataclasses.replace(request, ignore_stop=ignore_stop)

    runner = SingleTurnRunner(engine, make_request, letters)
    return generate(runner, params, PROMPTS, **dict(n=3, seed=7, version=5) | changes)


def test_rollouts_are_ordered_by_prompt_and_sample(llama):
    cfg, params = llama
    progress = []
    rollouts, stats = call(make_engine(cfg), params, on_progress=lambda *p: progress.append(p))
    assert [(r.prompt.id, r.sample) for r in rollouts] == [
        (i, s) for i in (4, 9, 2) for s in range(3)
    ]
    for r in rollouts:
        assert len(r.tokens) == len(r.logp) <= 12
        assert r.finish == ("stop" if r.tokens[-1] == 1 else "length")
        assert r.versions.tolist() == [5] * len(r.tokens) and r.text == letters(r.tokens)
    assert len({r.tokens.tobytes() for r in rollouts}) == 9  # all samples differ
    n_tokens = sum(len(r.tokens) for r in rollouts)
    assert progress[-1] == (n_tokens, 9, 9)
    assert 0 < stats["rollout/cache_utilization"] <= stats["rollout/cache_utilization_max"] <= 1
    assert stats["rollout/running"] > 0 and stats["rollout/tokens_per_s"] > 0


def test_samples_depend_on_the_seed(llama):
    cfg, params = llama
    engine = make_engine(cfg)
    first, again, other = (call(engine, params, seed=s)[0] for s in (7, 7, 8))
    same = [a.tokens.tolist() == b.tokens.tolist() for a, b in zip(first, again, strict=True)]
    assert all(same)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("top_k", [0, 1])
def test_rollouts_have_the_logprob_of_the_distribution_that_was_sampled(llama, top_k):
    cfg, params = llama
    rollouts, _ = call(make_engine(cfg), params, sampling=SamplingConfig(top_k=top_k))
    for r in rollouts:
        assert r.behavior_logp is not None and r.logp.max() < 0
        if top_k:  # one token has all the probability
            np.testing.assert_allclose(r.behavior_logp, np.zeros(len(r.tokens)), atol=1e-5)
        else:
            np.testing.assert_array_equal(r.behavior_logp, r.logp)


@pytest.mark.parametrize("spec_tokens", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_rollouts_have_the_tokens_that_the_filters_kept(llama, spec_tokens):
    cfg, params = llama
    engine = make_engine(cfg, keep_support=True, spec_tokens=spec_tokens)
    keys = dict(lens=30, ignore_stop=True)
    free, _ = call(engine, params, sampling=SamplingConfig(top_k=3), **keys)
    stop = free[0].text[10:13]
    rollouts, _ = call(engine, params, sampling=SamplingConfig(top_k=3, stop=(stop,)), **keys)
    assert len(rollouts[0].tokens) == free[0].text.index(stop) + 3
    for r in rollouts:
        assert r.support.counts.tolist() == [3] * len(r.tokens)
        assert (r.support.ids.reshape(-1, 3) == r.tokens[:, None]).any(axis=1).all()
    greedy, _ = call(engine, params, sampling=SamplingConfig(temperature=0.0, top_k=3))
    assert all(r.support.counts.tolist() == [0] * len(r.tokens) for r in greedy)


def test_ignore_stop_gives_forced_lengths(llama):
    cfg, params = llama
    lens = [5, 17, 9, 1, 30, 2, 8, 8, 11]
    rollouts, _ = call(make_engine(cfg), params, lens=lens, ignore_stop=True)
    assert [len(r.tokens) for r in rollouts] == lens


def test_a_stop_string_truncates_after_the_token_that_completes_it(llama):
    cfg, params = llama
    free = call(make_engine(cfg), params, ignore_stop=True, lens=30)[0]
    stop = free[0].text[10:13]
    engine = make_engine(cfg)
    rollouts, _ = call(
        engine, params, sampling=SamplingConfig(stop=(stop, "#")), ignore_stop=True, lens=30
    )
    end = free[0].text.index(stop) + 3
    assert rollouts[0].finish == "stop"
    assert rollouts[0].tokens.tolist() == free[0].tokens[:end].tolist()
    for name in ("logp", "behavior_logp"):
        assert getattr(rollouts[0], name).tolist() == getattr(free[0], name)[:end].tolist()
    assert engine.n_unfinished == 0


def test_a_rejected_request_leaves_nothing_queued(llama):
    cfg, params = llama
    engine = make_engine(cfg)
    with pytest.raises(ValueError, match="max_response_len"):
        call(engine, params, lens=[5] * 8 + [10_000])
    assert engine.n_unfinished == 0
    with pytest.raises(RuntimeError, match="stopped by the caller"):
        call(engine, params, on_progress=stop_now)
    assert engine.n_unfinished == 0 and engine.scheduler.pool.n_used == 0


def stop_now(*_):
    raise RuntimeError("stopped by the caller")
