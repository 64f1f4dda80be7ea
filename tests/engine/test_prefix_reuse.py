"""Tests of prefix caching in the engine: the results of computing the KV again."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.rollout.loop import SingleTurnRunner, generate, sampled_requests
from jaxrl.types import Prompt
from tests.engine.engine_cases import (
    FAMILIES,
    limit_pages,
    make_engine,
    make_params,
    make_requests,
    run,
    trainer_logps,
)


def conversation(engine, params, *, n_turns: int = 3, **changes):
    """Three conversations: the prompt of a turn is the conversation so far, and some new tokens."""
    rng = np.random.default_rng(5)
    requests = make_requests(3, n_samples=1, max_tokens=23, ignore_stop=True, **changes)
    turns = []
    for turn in range(n_turns):
        results = run(engine, params, requests)
        turns.append((requests, results))
        requests = [
            dataclasses.replace(
                request,
                tokens=np.concatenate(
                    [request.tokens, made, rng.integers(2, 512, 5 + turn, dtype=np.int32)],
                    dtype=np.int32,
                ),
            )
            for request, (made, _, _) in zip(requests, results, strict=True)
        ]
    return turns


@pytest.mark.bitwise
def test_a_conversation_is_bitwise_the_same_with_and_without_prefix_cache(llama):
    cfg, params = llama
    kept, alone = make_engine(cfg), make_engine(cfg, prefix_cache=False)
    turns, want = conversation(kept, params), conversation(alone, params)
    for (requests, results), (_, plain) in zip(turns, want, strict=True):
        assert results == plain
        for (_, logps, _), row in zip(
            results, trainer_logps(cfg, params, requests, results), strict=True
        ):
            np.testing.assert_array_equal(np.array(logps, np.float32), row)
    stats, plain = kept.take_stats(), alone.take_stats()
    n_tokens = sum(len(r.tokens) - 1 for requests, _ in turns for r in requests)
    assert plain.n_prefill_tokens == n_tokens and plain.n_cached_tokens == 0
    # A turn computes its 5 or 6 new tokens and the last sampled one, unless a page had too few
    # tokens to be copied; the first turn computes all.
    first = sum(len(r.tokens) - 1 for r in turns[0][0])
    new = sum(6 + turn for turn in range(2) for _ in range(3)) - 6
    assert first + new <= stats.n_prefill_tokens <= first + new + 6 * 16
    assert stats.n_cached_tokens == n_tokens - stats.n_prefill_tokens
    assert kept.scheduler.pool.n_used == 0


@pytest.mark.thorough
def test_windowed_layers_find_the_kv_they_need(one_device):
    cfg = FAMILIES["gemma3"]
    params = make_params(cfg)
    kept, alone = make_engine(cfg), make_engine(cfg, prefix_cache=False)
    for (_, results), (_, plain) in zip(
        conversation(kept, params, n_turns=2), conversation(alone, params, n_turns=2), strict=True
    ):
        assert [r[0] for r in results] == [r[0] for r in plain]
        for (_, logps, _), (_, want, _) in zip(results, plain, strict=True):
            np.testing.assert_allclose(logps, want, atol=1e-5)
    assert kept.take_stats().n_cached_tokens > 0


def test_eviction_and_preemption_change_no_result(llama):
    cfg, params = llama
    tight = make_engine(cfg)
    limit_pages(tight, 7)
    turns, want = conversation(tight, params), conversation(make_engine(cfg), params)
    assert [results for _, results in turns] == [results for _, results in want]
    assert tight.take_stats().n_preempted > 0


def test_new_weights_reuse_no_kv_of_the_old(llama):
    cfg, old = llama
    new = jax.tree.map(lambda w: w * 1.1, old)
    prompts = [
        Prompt(id=i, messages=(), tokens=r.tokens, answer="")
        for i, r in enumerate(make_requests(2, n_samples=1))
    ]

    def answer(engine, params, version):
        make_request = sampled_requests(SamplingConfig(), 12)
        runner = SingleTurnRunner(engine, make_request, lambda tokens: "")
        rollouts, metrics = generate(runner, params, prompts, n=2, seed=3, version=version)
        return [(r.tokens.tolist(), r.logp.tolist()) for r in rollouts], metrics

    engine = make_engine(cfg)
    first, metrics = answer(engine, old, 7)
    half_shared = metrics["rollout/prefix_hit_rate"]
    assert half_shared == 0.5  # two samples of each prompt
    again, metrics = answer(engine, old, 7)
    assert again == first and metrics["rollout/prefix_hit_rate"] == 1.0
    pool = engine.runner.cache.k[0].unsafe_buffer_pointer()
    renewed, metrics = answer(engine, new, 8)
    assert metrics["rollout/prefix_hit_rate"] == 0.5
    assert renewed == answer(make_engine(cfg), new, 8)[0] != first
    assert engine.runner.cache.k[0].unsafe_buffer_pointer() == pool  # allocated once
