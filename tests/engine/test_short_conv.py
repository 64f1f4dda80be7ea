"""Tests of engines of models with short convolutions next to attention."""

import dataclasses
from typing import Any

import pytest

from tests.engine.engine_cases import (
    SHORT_CONV,
    limit_pages,
    make_engine,
    make_params,
    make_requests,
    run,
    run_one_by_one,
)
from tests.engine.test_states import GREEDY, SIZES, assert_equal, assert_trainers

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("stacked", [False, True])
def test_logprobs_are_the_trainers_with_shared_prompts_chunks_and_preemption(one_device, stacked):
    cfg = dataclasses.replace(SHORT_CONV, stacked=stacked)
    params, requests = make_params(cfg, 2.0), make_requests(6, max_tokens=40, ignore_stop=True)
    sizes: Any = SIZES | dict(max_num_batched_tokens=128, state_snapshots=1)
    engine = make_engine(cfg, **sizes)
    limit_pages(engine, 6)
    results = run_one_by_one(engine, params, requests)
    assert_trainers(params, requests, results, cfg)
    stats = engine.take_stats()
    assert stats.n_preempted > 0 and stats.n_cached_tokens > 0


@pytest.mark.parametrize("stacked", [False, True])
def test_draft_tokens_give_the_results_of_decoding_one_by_one(one_device, stacked):
    cfg = dataclasses.replace(SHORT_CONV, V=8, stacked=stacked)
    params = make_params(cfg, 2.0)
    requests = make_requests(3, V=8, max_tokens=40, ignore_stop=True, sampling=GREEDY)
    want = run(make_engine(cfg, **SIZES), params, requests)
    engine = make_engine(cfg, **SIZES, spec_tokens=4)
    assert_equal(run(engine, params, requests), want)
    assert engine.take_stats().n_accepted_tokens > 0
