"""Prompts that are computed while others decode: the same bits, and nobody waits longer than a dispatch."""

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
    make_engine,
    make_params,
    make_requests,
    run,
    run_one_by_one,
)

PART = 128  # tokens: two rows, the least that a dispatch computes


def both_ways(family: str, **changes):
    """The results of prompts that are computed beside steps, and of those computed before any."""
    cfg = FAMILIES[family]
    params = make_params(cfg)
    requests = make_requests(6, n_samples=1, max_tokens=30)
    apart = make_engine(cfg, max_num_batched_tokens=2048, **changes)
    want = run(apart, params, requests)
    engine = make_engine(cfg, max_num_batched_tokens=PART, steps_per_dispatch=4, **changes)
    results = run_one_by_one(engine, params, requests)
    assert has_mixed(engine) and not has_mixed(apart)
    return results, want


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", dict()),
        ("llama", dict(spec_tokens=3, kv_dtype="int8")),
        pytest.param("gemma2", dict(), marks=pytest.mark.slow),
    ],
)
def test_a_step_beside_a_prompt_has_the_bits_of_one_without(one_device, family, changes):
    results, want = both_ways(family, **changes)
    assert results == want


@pytest.mark.slow
def test_a_step_beside_a_prompt_reaches_its_experts(one_device):
    """Their sums are not the same to the last bit in every batch, with or without mixing."""
    results, want = both_ways("qwen3_moe")
    for (tokens, logps, _), row in zip(results, want, strict=True):
        assert tokens == row[0]
        np.testing.assert_allclose(logps, row[1], atol=1e-5)


def long_engine(cfg, **changes) -> PagedEngine:
    rollout = dataclasses.replace(SMALL, max_num_batched_tokens=PART, **changes)
    return PagedEngine(cfg, rollout, rules=DECODE, dtype=jnp.float32, max_len=1024, eos_ids=())


@pytest.fixture
def long_llama(one_device):
    cfg = dataclasses.replace(FAMILIES["llama"], max_len=1024)
    return cfg, make_params(cfg)


def prompt(n: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 512, n, dtype=np.int32)


SHORT = Request(tokens=prompt(9), max_tokens=200)
LONG = Request(tokens=prompt(900), max_tokens=3, prompt_id=1)
N_PARTS = 8  # 899 keys are seven times 128, and three


def started(engine: PagedEngine, params) -> tuple[int, int]:
    """The slots of a short request that decodes, and of a long one that has come."""
    slot = engine.submit(SHORT)
    engine.generate(params)
    engine.take_stats()
    return slot, engine.submit(LONG)


def test_sequences_get_a_token_in_every_part_of_a_long_prompt(long_llama):
    cfg, params = long_llama
    [want] = run(long_engine(cfg), params, [LONG])
    engine = long_engine(cfg)
    short, long = started(engine, params)
    for i in range(N_PARTS):
        made = {out.slot: out.tokens.tolist() for out in engine.generate(params)}
        stats = engine.take_stats()
        last = i == N_PARTS - 1
        assert stats.n_prefill_tokens == (3 if last else PART)
        assert stats.n_cached_tokens == 0  # the parts before are its own
        assert set(made) == ({short, long} if last else {short})
        assert len(made[short]) == (SMALL.steps_per_dispatch if last else 1)
        assert engine.n_unfinished == 2 - last
    assert made[long] == want[0]


def test_a_long_prompt_that_nobody_waits_for_is_computed_at_once(long_llama):
    cfg, params = long_llama
    engine = long_engine(cfg)
    engine.submit(LONG)
    assert len(engine.generate(params)) == 1
    assert engine.take_stats().n_prefill_tokens == 899 and not has_mixed(engine)


def test_a_cancelled_prompt_holds_nothing_and_its_parts_are_found_again(long_llama):
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
    # 3 parts; of them the next request finds two full pages, and 43 keys in a third
    assert (stats.n_prefill_tokens, stats.n_cached_tokens) == (3 * PART, 299)
    while engine.n_unfinished:
        for out in engine.generate(params):
            got += out.tokens.tolist() if out.slot == short else []
    assert got == want[0][SMALL.steps_per_dispatch :]
    assert engine.scheduler.pool.n_used == 0


def test_parts_of_old_weights_are_computed_anew(long_llama):
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
    assert engine.take_stats().n_prefill_tokens == 4 * PART + 899


def test_a_full_pool_takes_parts_back_and_everything_ends(long_llama):
    """19 pages: the prompt's 15 and the other sequence's 4 fill them to the last."""
    cfg, params = long_llama
    want = run(long_engine(cfg), params, [SHORT, LONG])
    engine = long_engine(cfg, n_pages=19)
    assert run_one_by_one(engine, params, [SHORT, LONG]) == want
    tight = long_engine(cfg, n_pages=16)  # the long one waits for the other's end
    assert run_one_by_one(tight, params, [SHORT, LONG]) == want
    assert tight.scheduler.pool.n_used == 0


def test_without_kept_pages_a_prompt_is_computed_at_once(long_llama):
    cfg, params = long_llama
    engine = long_engine(cfg, prefix_cache=False)
    started(engine, params)
    assert len(engine.generate(params)) == 2
    assert engine.take_stats().n_prefill_tokens == 899 and not has_mixed(engine)
