"""Tests of chunked prefill and mixed dispatches: the same bits, bounded latency for decode."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.engine.api import Request
from jaxrl.engine.engine import PagedEngine
from sharding.rules import DECODE
from tests.engine.engine_cases import (
    FAMILIES,
    SMALL,
    has_mixed,
    limit_pages,
    make_engine,
    make_params,
    make_requests,
    record_dispatches,
    run,
    run_one_by_one,
)

CHUNK = 128  # tokens: two rows, the smallest prefill dispatch


def both_ways(family: str, **changes):
    """The results with mixed dispatches, and with prefill before all decode steps."""
    cfg = FAMILIES[family]
    params = make_params(cfg)
    requests = make_requests(6, n_samples=1, max_tokens=30)
    changes = dict(max_num_batched_tokens=CHUNK, steps_per_dispatch=4) | changes
    separate = make_engine(cfg, **changes)
    before = record_dispatches(separate)
    want = run(separate, params, requests)
    engine = make_engine(cfg, **changes)
    dispatched = record_dispatches(engine)
    results = run_one_by_one(engine, params, requests)
    assert has_mixed(dispatched) and not has_mixed(before)
    return results, want


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", dict()),
        pytest.param("llama", dict(spec_tokens=3, kv_dtype="int8"), marks=pytest.mark.thorough),
        pytest.param("gemma2", dict(), marks=pytest.mark.slow),
    ],
)
def test_a_mixed_dispatch_has_the_bits_of_separate_ones(one_device, family, changes):
    results, want = both_ways(family, **changes)
    assert results == want


@pytest.mark.slow
def test_a_mixed_dispatch_of_a_moe_model_gives_the_results_of_separate_ones(one_device):
    """Expert sums depend on the batch in the last bit, with and without mixing."""
    results, want = both_ways("qwen3_moe")
    for (tokens, logps, _), row in zip(results, want, strict=True):
        assert tokens == row[0]
        np.testing.assert_allclose(logps, row[1], atol=1e-5)


def long_engine(cfg, **changes) -> PagedEngine:
    changes = dict(max_num_batched_tokens=CHUNK, n_pages=128) | changes
    rollout = dataclasses.replace(SMALL, **changes)
    return PagedEngine(cfg, rollout, rules=DECODE, dtype=jnp.float32, max_len=1024, eos_ids=())


@pytest.fixture
def long_llama(one_device):
    cfg = dataclasses.replace(FAMILIES["llama"], max_len=1024)
    return cfg, make_params(cfg)


def prompt(n: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 512, n, dtype=np.int32)


SHORT = Request(tokens=prompt(9), max_tokens=200)
LONG = Request(tokens=prompt(900), max_tokens=3, prompt_id=1)
N_CHUNKS = 8  # 899 tokens to prefill: seven times 128, and three


def started(engine: PagedEngine, params) -> tuple[int, int]:
    """The slots of a short request that decodes, and of a long one that has just arrived."""
    slot = engine.submit(SHORT)
    engine.generate(params)
    long = engine.submit(LONG)
    engine.generate(params)  # a round that was dispatched before
    engine.take_stats()
    return slot, long


@pytest.mark.thorough
def test_sequences_get_a_token_in_every_chunk_of_a_long_prompt(long_llama):
    cfg, params = long_llama
    [want] = run(long_engine(cfg), params, [LONG])
    engine = long_engine(cfg)
    short, long = started(engine, params)
    for i in range(N_CHUNKS):
        made = {out.slot: out.tokens.tolist() for out in engine.generate(params)}
        stats = engine.take_stats()
        last = i == N_CHUNKS - 1
        assert stats.n_prefill_tokens == (3 if last else CHUNK)
        assert stats.n_cached_tokens == 0  # its own chunks are not counted
        assert set(made) == ({short, long} if last else {short})
        assert len(made[short]) == (SMALL.steps_per_dispatch if last else 1)
        assert engine.n_unfinished == 2 - last
    assert made[long] == want[0]


@pytest.mark.thorough
def test_a_long_prompt_is_not_chunked_when_idle(long_llama):
    cfg, params = long_llama
    engine = long_engine(cfg)
    dispatched = record_dispatches(engine)
    engine.submit(LONG)
    assert len(engine.generate(params)) == 1
    assert engine.take_stats().n_prefill_tokens == 899 and not has_mixed(dispatched)


@pytest.mark.thorough
def test_a_cancelled_prompt_holds_no_pages_and_its_chunks_stay_cached(long_llama):
    cfg, params = long_llama
    [want] = run(long_engine(cfg), params, [SHORT])
    engine = long_engine(cfg)
    short, long = started(engine, params)
    got = []
    for i in range(5):
        if i == 3:
            engine.free(long)
            long = engine.submit(dataclasses.replace(LONG, tokens=LONG.tokens[:300]))
        for out in engine.generate(params):
            got += out.tokens.tolist() if out.slot == short else []
    stats = engine.take_stats()
    # 3 chunks: the next request finds 4 full pages and 43 tokens of the next one
    assert (stats.n_prefill_tokens, stats.n_cached_tokens) == (3 * CHUNK, 299)
    while engine.n_unfinished:
        for out in engine.generate(params):
            got += out.tokens.tolist() if out.slot == short else []
    assert got == want[0][2 * SMALL.steps_per_dispatch :]
    assert engine.scheduler.pool.n_used == 0


@pytest.mark.thorough
def test_chunks_of_old_weights_are_computed_again(long_llama):
    cfg, params = long_llama
    new = make_params(cfg, scale=3.0)
    [want] = run(long_engine(cfg), new, [LONG])
    engine = long_engine(cfg)
    _, long = started(engine, params)
    for _ in range(4):
        engine.generate(params)
    engine.set_version(1)
    got = [], []
    while engine.n_unfinished:
        for out in engine.generate(new):
            if out.slot == long:
                got[0].extend(out.tokens.tolist())
                got[1].extend(out.logp.tolist())
    assert got == want[:2]
    assert engine.take_stats().n_prefill_tokens == 4 * CHUNK + 899


def test_a_full_pool_evicts_chunks_and_everything_ends(long_llama):
    """The prompt's 15 pages and the other sequence's 4 use exactly 19."""
    cfg, params = long_llama
    want = run(long_engine(cfg), params, [SHORT, LONG])
    engine = long_engine(cfg)
    limit_pages(engine, 19)
    assert run_one_by_one(engine, params, [SHORT, LONG]) == want
    tight = long_engine(cfg)
    taken = limit_pages(tight, 16)  # the long prompt waits for the end of the other sequence
    assert run_one_by_one(tight, params, [SHORT, LONG]) == want
    tight.scheduler.pool.release(taken)
    assert tight.scheduler.pool.n_used == 0


def test_without_prefix_cache_a_prompt_is_not_chunked(long_llama):
    cfg, params = long_llama
    engine = long_engine(cfg, prefix_cache=False)
    dispatched = record_dispatches(engine)
    started(engine, params)
    assert len(engine.generate(params)) == 2
    assert engine.take_stats().n_prefill_tokens == 899 and not has_mixed(dispatched)
