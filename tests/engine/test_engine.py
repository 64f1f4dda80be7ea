"""Tests of engine.py, model_runner.py, kv_pool.py, batches.py, programs.py and decode_loop.py."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.engine.device import programs
from jaxrl.engine.device.model_runner import FILTERED, Dispatch
from jaxrl.engine.engine import PagedEngine
from jaxrl.models.packed import forward_packed
from jaxrl.runtime.compilation import CompileThreads
from sharding import make_mesh, on_mesh
from sharding.rules import TRAIN
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
    trainer_logps,
)
from tests.marks import graded
from tests.models.resized import resized

GREEDY = SamplingConfig(temperature=0.0)

CASES = [("llama", 0.7), *((family, 1.0) for family in FAMILIES)]
THOROUGH = [
    (family, 1.0)
    for family in ("gemma3", "gemma4", "gemma4_moe", "qwen2", "qwen3_moe", "mixtral", "gpt_oss")
]


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("family", "temperature"), graded(CASES, default=CASES[:2], thorough=THOROUGH)
)
def test_logprobs_are_bitwise_the_trainers(one_device, family, temperature):
    cfg = FAMILIES[family]
    params = make_params(cfg)
    requests = make_requests(8, sampling=SamplingConfig(temperature=temperature))
    results = run(make_engine(cfg), params, requests)
    want = trainer_logps(cfg, params, requests, results, temperature)
    for (_, logps, _), row in zip(results, want, strict=True):
        np.testing.assert_array_equal(np.array(logps, np.float32), row)
        assert np.min(row) < -1  # sharper distributions would make any two agree


@pytest.mark.bitwise
@pytest.mark.thorough
def test_logprobs_of_experts_in_a_stack_are_bitwise_the_trainers(one_device):
    """The engine reads them in the stack; the trainer slices layers."""
    cfg = dataclasses.replace(FAMILIES["qwen3_moe"], stacked=True)
    params = make_params(cfg)
    requests = make_requests(8)
    results = run(make_engine(cfg), params, requests)
    want = trainer_logps(cfg, params, requests, results)
    for (_, logps, _), row in zip(results, want, strict=True):
        np.testing.assert_array_equal(np.array(logps, np.float32), row)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.thorough)])
def test_greedy_tokens_are_the_full_forwards_argmax(one_device, family):
    cfg = FAMILIES[family]
    params = make_params(cfg)
    requests = make_requests(4, sampling=GREEDY)
    results = run(make_engine(cfg), params, requests)

    @jax.jit
    def next_token(tokens, last):
        T = tokens.shape[1]
        ones, positions = jnp.ones_like(tokens), jnp.arange(T)[None]
        hidden = forward_packed(params, tokens, ones, positions, rules=TRAIN)
        return jnp.argmax(params.logits(hidden, TRAIN)[0, last])

    for request, (made, _, finish) in zip(requests, results, strict=True):
        row = list(request.tokens)
        for token in made:
            padded = np.zeros((1, 256), np.int32)
            padded[0, : len(row)] = row
            assert token == next_token(padded, len(row) - 1)
            row.append(token)
        assert finish == ("stop" if made[-1] == 1 else "length")


@pytest.mark.thorough
@pytest.mark.bitwise
def test_a_request_gives_the_same_alone_in_a_batch_and_in_any_order(llama):
    cfg, params = llama
    requests = make_requests(12)
    results = run(make_engine(cfg), params, requests)
    alone = [run(make_engine(cfg), params, [r])[0] for r in requests[:3]]
    assert alone == results[:3]
    assert run(make_engine(cfg), params, requests[::-1])[::-1] == results
    assert run(make_engine(cfg, max_num_seqs=3, steps_per_dispatch=5), params, requests) == results


def test_preemption_changes_no_result(llama):
    cfg, params = llama
    requests = make_requests(8, max_tokens=100, ignore_stop=True)
    results = run(make_engine(cfg), params, requests)
    tight = make_engine(cfg)
    taken = limit_pages(tight, 7)
    assert run(tight, params, requests) == results
    assert tight.take_stats().n_preempted > 0
    tight.scheduler.pool.release(taken)
    assert tight.scheduler.pool.n_used == 0


def test_pages_shorter_than_a_prefill_row_give_the_same(llama):
    cfg, params = llama
    requests = make_requests(6)
    short = make_engine(cfg, page_len=16, n_pages=128, implementation="reference")
    results = run(short, params, requests)
    for (tokens, logps, _), want in zip(
        results, run(make_engine(cfg), params, requests), strict=True
    ):
        assert tokens == want[0]
        np.testing.assert_allclose(logps, want[1], atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama", dict(fsdp=2, tensor=2)), ("mixtral", dict(expert=2, tensor=2))],
)
def test_a_mesh_gives_the_results_of_one_device(family, sizes):
    cfg = FAMILIES[family]
    requests = make_requests(6, sampling=GREEDY)
    with jax.set_mesh(make_mesh()):
        want = run(make_engine(cfg), make_params(cfg), requests)
    with jax.set_mesh(make_mesh(**sizes)):
        params = make_params(cfg)
        engine = make_engine(cfg)
        dispatched = record_dispatches(engine)
        results = run_one_by_one(engine, params, requests[::-1])[::-1]
        spec = jax.typeof(engine.runner.cache.k[0]).sharding.spec
    assert spec[1] == "tensor"  # each device holds its own heads' pages
    assert has_mixed(dispatched)
    for (tokens, logps, _), (want_tokens, want_logps, _) in zip(results, want, strict=True):
        assert tokens == want_tokens
        np.testing.assert_allclose(logps, want_logps, atol=1e-4)


@pytest.mark.thorough
def test_stacked_layers_give_the_results_of_listed_ones(llama):
    cfg, params = llama
    stacked_cfg = dataclasses.replace(cfg, stacked=True)
    stacked = make_params(stacked_cfg)
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.layers)
    stacked.layers = layers
    for name in ("embed", "norm", "lm_head"):
        setattr(stacked, name, getattr(params, name))
    requests = make_requests(4, sampling=GREEDY)
    want = run(make_engine(cfg), params, requests)
    for (tokens, logps, _), row in zip(
        run(make_engine(stacked_cfg), stacked, requests), want, strict=True
    ):
        assert tokens == row[0]
        np.testing.assert_allclose(logps, row[1], atol=1e-5)


def test_prefill_and_insert_give_the_results_of_submit(llama):
    cfg, params = llama
    requests = make_requests(4, n_samples=4)
    want = run(make_engine(cfg), params, requests)
    engine = make_engine(cfg)
    prefix = engine.prefill(params, requests[0].tokens)
    slots = [engine.insert(prefix, r) for r in requests]
    made = {slot: ([], []) for slot in slots}
    while engine.n_unfinished:
        for g in engine.generate(params):
            made[g.slot][0].extend(g.tokens.tolist())
            made[g.slot][1].extend(g.logp.tolist())
    assert [made[slot] for slot in slots] == [(tokens, logps) for tokens, logps, _ in want]
    engine.release_prefix(prefix)
    assert engine.scheduler.pool.n_used == 0


def test_samples_of_a_prompt_share_its_pages_and_its_prefill(llama):
    cfg, params = llama
    tokens = np.arange(
        2, 2 + 130, dtype=np.int32
    )  # 129 cached tokens: two full pages, and one token in a third
    group = [dataclasses.replace(make_requests(1)[0], tokens=tokens, sample=i) for i in range(8)]
    engine = make_engine(cfg)
    for request in group:
        engine.submit(request)
    engine.generate(params)
    assert engine.scheduler.pool.n_used == 2 + 8
    stats = engine.take_stats()
    assert (stats.n_prefill_tokens, stats.n_cached_tokens) == (129, 7 * 129)


def test_the_device_reads_the_trainers_own_arrays(llama):
    cfg, params = llama
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]
    engine = make_engine(cfg)
    engine.warmup(params)
    with jax.transfer_guard_device_to_device("disallow"):
        run(engine, params, make_requests(4))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)] == pointers
    held = [v for v in [*vars(engine).values(), *vars(engine.runner).values()] if v is params]
    assert not held


def test_decode_copies_neither_weights_nor_pool(llama):
    cfg, params = llama
    engine = make_engine(resized(cfg, V=4096, F=2048), n_pages=256)
    params = make_params(engine.cfg)
    decode = programs.engine_program(
        "decode", rules=engine.pool.rules, implementation=None, max_steps=8
    )
    compiled = decode.lower(
        params,
        engine.runner.allocated_cache(),
        engine.runner.decode_batch([[]], 8),
        np.int32(8),
        np.int32(0),
    ).compile()
    memory = compiled.memory_analysis()
    pool_bytes = engine.pool.bytes_per_device.of_pages(256)
    assert memory.alias_size_in_bytes >= pool_bytes  # donated, updated in place
    one_layers_pool = pool_bytes // (2 * cfg.L)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert memory.temp_size_in_bytes < min(one_layers_pool, weights)


def generated_in_turns(engine: PagedEngine, weights: list, at: int) -> dict:
    """All that the engine generates by slot and version, as tokens and logprobs.

    One of the requests is cancelled before the call `at`. If there are two `weights`, those of
    version 1 follow then.
    """
    slots = [engine.submit(r) for r in make_requests(4, max_tokens=60, ignore_stop=True)]
    found, n_calls = collections.defaultdict(lambda: ([], [])), 0
    while engine.n_unfinished:
        if n_calls == at:
            engine.set_version(len(weights) - 1)
            engine.free(slots[1])
        for out in engine.generate(weights[-1 if n_calls >= at else 0]):
            found[out.slot, out.version][0].extend(out.tokens.tolist())
            found[out.slot, out.version][1].extend(out.logp.tolist())
        n_calls += 1
    assert engine.scheduler.pool.n_used == 0
    return dict(found)


def test_rounds_that_are_dispatched_ahead_change_no_result_and_old_weights_none(llama, monkeypatch):
    cfg, params = llama
    weights = [params, jax.tree.map(lambda w: w * 1.5, params)]
    ahead = make_engine(cfg)
    results = generated_in_turns(ahead, weights, at=3)
    monkeypatch.setattr(PagedEngine, "_dispatch_next", lambda *_: None)
    assert results == generated_in_turns(make_engine(cfg), weights, at=3)
    assert {version for _, version in results} == {0, 1}


def test_rounds_after_a_cancelled_sequence_leave_the_pages_of_others(llama, monkeypatch):
    cfg, params = llama
    results = generated_in_turns(make_engine(cfg), [params], at=3)
    monkeypatch.setattr(PagedEngine, "_dispatch_next", lambda *_: None)
    assert results == generated_in_turns(make_engine(cfg), [params], at=3)


def test_a_round_with_a_stop_string_is_read_before_the_next_one(llama):
    cfg, params = llama
    for stop in ((), ("x",)):
        engine = make_engine(cfg)
        engine.submit(make_requests(1, max_tokens=60, sampling=SamplingConfig(stop=stop))[0])
        engine.generate(params)
        assert (engine._ahead is None) == bool(stop)


def test_nothing_compiles_after_warmup(llama):
    cfg, params = llama
    compiled = []

    def listener(name, seconds, *, fun_name="", **_):
        if "backend_compile" in name:
            compiled.append(fun_name)

    engine = make_engine(cfg)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        n_programs = engine.warmup(params)
        kinds = {f"jit({kind})" for kind in ("prefill", "mixed", "copy_pages", "decode")}
        assert sum(name in kinds for name in compiled) <= n_programs  # each was compiled once
        compiled.clear()
        dispatched = record_dispatches(engine)
        run(engine, params, make_requests(13, max_tokens=60))
        run(
            engine,
            params,
            make_requests(1, sampling=SamplingConfig(top_k=5, stop_token_ids=(7, 9))),
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == []
    assert len(dispatched) <= n_programs


def test_only_batches_with_a_filter_use_the_programs_with_filters(llama):
    cfg, params = llama
    engine, [plain, _] = make_engine(cfg), make_requests(2, n_samples=1, max_tokens=4)
    filtering = dataclasses.replace(plain, sample=1, sampling=SamplingConfig(top_k=2))
    dispatched = record_dispatches(engine)
    alone = run(engine, params, [plain])
    assert not any(one.variant.filtered for one in dispatched)
    assert run(engine, params, [plain, filtering])[:1] == alone
    assert any(one.variant.filtered for one in dispatched)
    engine = make_engine(cfg, filters=("top_p",))
    with pytest.raises(ValueError, match="without the sampling filter top_k"):
        engine.submit(filtering)


def test_requests_are_served_before_all_programs_are_compiled(llama):
    cfg, params = llama
    requests = make_requests(5, max_tokens=20)
    results = run(make_engine(cfg), params, requests)
    engine = make_engine(cfg)
    engine.warmup_first(params)
    dispatched = record_dispatches(engine)
    assert run(engine, params, requests) == results
    used = set(dispatched)
    assert used == {
        Dispatch("prefill", 2),
        Dispatch("copy_pages", 16),
        Dispatch("decode", engine.shapes.decode_buckets[-1], FILTERED),  # serves all requests
    }
    with CompileThreads() as threads:
        engine.compile_pending(on_mesh(params, jax.sharding.get_mesh()), threads)
    assert run(engine, params, requests) == results
    assert used < dispatched  # smaller batches, too


def test_release_frees_the_pool_and_the_next_call_allocates_it_anew(llama):
    cfg, params = llama
    engine = make_engine(cfg)
    want = run(engine, params, make_requests(2))
    pool = engine.runner.cache.k[0]
    engine.release()
    assert engine.runner.cache is None and engine.n_unfinished == 0
    del pool
    assert run(engine, params, make_requests(2)) == want


def test_stop_ids_of_a_request_end_it_with_the_id_included(llama):
    cfg, params = llama
    request = make_requests(1, max_tokens=40, ignore_stop=True)[0]
    free_run = run(make_engine(cfg), params, [request])[0]
    stop = free_run[0][5]
    stopping = dataclasses.replace(
        request, ignore_stop=False, sampling=SamplingConfig(stop_token_ids=(500, stop))
    )
    tokens, logps, finish = run(make_engine(cfg), params, [stopping])[0]
    first = free_run[0].index(stop)
    assert (tokens, finish) == (free_run[0][: first + 1], "stop")
    assert logps == free_run[1][: first + 1]


def test_requests_that_can_never_run_are_rejected(llama):
    cfg, _ = llama
    tokens = np.arange(2, 150, dtype=np.int32)
    request = dataclasses.replace(make_requests(1)[0], tokens=tokens)
    with pytest.raises(ValueError, match="max_response_len"):
        make_engine(cfg).submit(dataclasses.replace(request, max_tokens=200))
    with pytest.raises(ValueError, match=r"need 4 KV pages, the pool has 3.*rollout.n_pages"):
        make_engine(cfg, n_pages=3).submit(dataclasses.replace(request, max_tokens=60))
    with pytest.raises(ValueError, match="prompt token"):
        make_engine(cfg).submit(dataclasses.replace(request, tokens=tokens[:0]))
    many = SamplingConfig(stop_token_ids=tuple(range(16)))
    with pytest.raises(ValueError, match="stop_token_ids"):
        make_engine(cfg).submit(dataclasses.replace(request, sampling=many))
    with pytest.raises(ValueError, match="max_prompt_len"):
        make_engine(dataclasses.replace(cfg, max_len=100))
    with pytest.raises(ValueError, match=r"rollout\.page_len is 0"):
        make_engine(cfg, dataclasses.replace(SMALL, page_len=0))


def test_the_pool_takes_what_memory_utilization_leaves(llama, monkeypatch):
    cfg, _ = llama
    mixer = cfg.layers[0].mixer
    page = 2 * cfg.L * mixer.K * 64 * mixer.H * 4  # bytes: keys and values, all layers, float32

    def with_memory(n_pages_left: float) -> PagedEngine:
        memory = dict(bytes_limit=1000 * page, bytes_in_use=int((500 - n_pages_left) * page))
        monkeypatch.setattr(jax, "local_devices", lambda: [Device(memory), Device(None)])
        return make_engine(cfg, memory_utilization=0.5, n_pages=0)

    assert with_memory(9.5).scheduler.pool.n_pages == 9
    assert (
        with_memory(300).scheduler.pool.n_pages == 8 * 4
    )  # 8 sequences of 256 tokens need no more
    with pytest.raises(ValueError, match=r"room for 3 KV pages.*memory_utilization \(0.5\)"):
        _ = with_memory(3.9).scheduler


@dataclasses.dataclass
class Device:
    memory: dict | None

    def memory_stats(self) -> dict | None:
        return self.memory


def test_a_failed_dispatch_leaves_an_engine_that_works(llama, monkeypatch):
    cfg, params = llama
    engine = make_engine(cfg)
    want = run(engine, params, make_requests(2))
    with monkeypatch.context() as patch:
        patch.setitem(engine.runner._programs, "decode", lambda *_: 1 / 0)
        engine.submit(make_requests(1)[0])
        with pytest.raises(ZeroDivisionError):
            engine.generate(params)
    assert engine.n_unfinished == 0
    assert run(engine, params, make_requests(2)) == want
