"""Layers with a window keep the pages of their window only; results are those with all pages."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.config.keys import RolloutConfig, SamplingConfig
from jaxrl.engine.api import Request
from jaxrl.engine.device import batches
from jaxrl.engine.device.kv_pool import PoolBytes, window_page_counts
from jaxrl.engine.engine import PagedEngine
from jaxrl.engine.pages import FREED, PagePool
from jaxrl.engine.scheduler import Scheduler
from jaxrl.engine.windows import WindowPages
from sharding.rules import DECODE
from tests.engine.engine_cases import FAMILIES, HYBRID, make_params, run, run_one_by_one

ROLLOUT = RolloutConfig(
    max_num_seqs=4, max_num_batched_tokens=128, page_len=64, steps_per_dispatch=8, n_pages=24
)
MAX_LEN = 512


def window_engine(cfg, **changes) -> PagedEngine:
    rollout = dataclasses.replace(ROLLOUT, **changes)
    return PagedEngine(
        cfg, rollout, rules=DECODE, dtype=jax.numpy.float32, max_len=MAX_LEN, eos_ids=(1,)
    )


def conversations(n: int, n_samples: int, seed: int) -> list[Request]:
    """Requests over several pages, of which `n_samples` each share a prompt."""
    rng, requests = np.random.default_rng(seed), []
    for prompt_id in range(n):
        tokens = rng.integers(2, 512, int(rng.integers(40, 230)), dtype=np.int32)
        for sample in range(n_samples):
            n_tokens = int(rng.integers(20, 150))
            requests.append(
                Request(tokens, n_tokens, SamplingConfig(), prompt_id=prompt_id, sample=sample)
            )
    return requests


def next_turns(requests, results) -> list[Request]:
    """The requests that continue the first half of each result with a few tokens."""
    turns = []
    for request, (made, *_) in zip(requests, results, strict=True):
        tokens = np.concatenate([request.tokens, made[: len(made) // 2], [3, 4, 5]])
        turns.append(dataclasses.replace(request, tokens=tokens.astype(np.int32), max_tokens=30))
    return turns


CASES = {
    "stacked layers of two groups": ("gemma3", True, {}),
    "few pages": ("mistral", False, {"n_pages": 8}),
    "stacked layers of two shapes, some without pages": ("gemma4", True, {}),
    "speculative": ("gemma3", False, {"spec_tokens": 3}),
    "without prefix cache": ("mistral", True, {"prefix_cache": False}),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "stacked", "changes"), CASES.values(), ids=CASES)
def test_results_are_those_with_all_pages(one_device, monkeypatch, family, stacked, changes):
    """Over page borders, with shared prompts, prompts in chunks, preemption and later turns."""
    cfg = dataclasses.replace(FAMILIES[family], stacked=stacked)
    params = make_params(cfg)
    windowed = window_engine(cfg, **changes)
    with monkeypatch.context() as patch:
        for module in ("engine", "device.batches"):
            patch.setattr(f"jaxrl.engine.{module}.window_page_counts", lambda *_: {})
        kept = window_engine(cfg, **changes)
    assert kept.shapes.windows == (0,) and len(windowed.shapes.windows) == 2
    requests = conversations(4, 2, seed=1)
    for serve in (run, run_one_by_one):
        results = serve(windowed, params, requests)
        assert results == serve(kept, params, requests)
        requests = next_turns(requests, results)
    size = [sum(a.nbytes for a in jax.tree.leaves(e.runner.cache)) for e in (windowed, kept)]
    if "n_pages" in changes:
        assert windowed.take_stats().n_preempted > 0
    else:
        assert size[0] < size[1]
    assert windowed.scheduler.pool.utilization == 0


def window_scheduler(window: int, n_window_pages: int = 9) -> Scheduler:
    pool = PagePool(30, 4, windows=[WindowPages(n_window_pages, 4, window)])
    return Scheduler(
        pool, max_num_seqs=4, steps_per_dispatch=4, max_len=60, row_len=4, rows_per_dispatch=8
    )


def test_a_window_moves_on_and_frees_the_pages_that_it_leaves():
    s = window_scheduler(6)
    s.submit(Request(np.arange(13, dtype=np.int32), 20))
    plan = s.plan()
    [seq] = plan.decode
    assert len(seq.pages) == 4  # 12 tokens of KV and 4 steps
    # Prefill needs them all.
    assert plan.prefill.chunks[0].tables[6] == seq.tables[6][:4].tolist()
    s.advance(seq, [1, 2, 3, 4], "")
    [seq] = s.plan().decode
    # The token at 16 sees 11..16, from page 2 on.
    assert seq.tables[6][:2].tolist() == [FREED, FREED] and FREED not in seq.tables[6][2:]
    assert len(seq.pages) == 5 and s.pool.windows[0].n_free == 9 - 3


def test_a_cached_prefix_without_the_pages_of_its_window_is_computed_again():
    s = window_scheduler(6)
    prompt = np.arange(21, dtype=np.int32)
    s.submit(Request(prompt, 8))
    for finish in ("", "length"):
        [seq] = s.plan().decode
        s.advance(seq, [7] * 4, finish)
    s.submit(Request(prompt + 30, 4))  # its 6 pages evict the first 4 of the prompt
    [seq] = s.plan().decode
    s.advance(seq, [7] * 4, "length")
    s.submit(Request(prompt, 4))
    [chunk] = s.plan().prefill.chunks  # the next token is at 20 and sees 15..20, from page 3 on
    assert chunk.start == 0
    # Layers without a window have the KV of the 5 shared pages; others have that of the last one.
    assert [page < FREED for page in chunk.tables[0]] == [True] * 5 + [False]
    assert [page < FREED for page in chunk.tables[6]] == [False] * 4 + [True, False]


def test_window_pools_are_sized_for_their_sequences():
    cfg = FAMILIES["gemma3"]
    assert window_page_counts(cfg, ROLLOUT, MAX_LEN) == {32: 2}  # 32 + 8 tokens may be in 2 pages
    assert window_page_counts(cfg, ROLLOUT, 128) == {}  # as many as a sequence has
    assert batches.dispatch_shapes(ROLLOUT, MAX_LEN, cfg).windows == (0, 32)
    pool = PoolBytes({0: 100, 32: 1000}, {32: 2}, max_num_seqs=4, max_pages_per_seq=8)
    assert pool.window_pages(24) == {32: 4 * 2 + 8}
    assert pool.window_pages(10) == {32: 10}  # never more than the others
    assert pool.of_pages(24) == 24 * 100 + 16 * 1000
    assert pool.n_pages_in(24 * 100 + 16 * 1000 + 99, 32) == 24
    assert pool.n_pages_in(-1, 32) == 0


def test_layers_with_a_window_keep_all_pages_next_to_states_and_the_log_says_so(one_device, caplog):
    attention = HYBRID.layers[-1]
    window = dataclasses.replace(attention.mixer, window=32)
    layers = (HYBRID.layers[0], dataclasses.replace(attention, mixer=window))
    caplog.set_level("INFO", "jaxrl.engine.device.kv_pool")
    for found in (layers, HYBRID.layers, FAMILIES["gemma3"].layers):
        engine = window_engine(dataclasses.replace(HYBRID, layers=found))
        assert engine.set_pool_size()
        assert engine.set_pool_size()
    assert [r.message for r in caplog.records] == [
        "KV pool: layers with a window keep all pages, because the model has states"
    ]
