"""Tests of speculative.py: the tokens and logprobs of decoding one at a time, in fewer passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.engine.device.speculative import SpeculationConfig, propose_drafts
from jaxrl.models.packed import forward_packed
from sharding import make_mesh
from sharding.rules import DECODE, REPLICAS, TRAIN
from tests.engine.engine_cases import (
    FAMILIES,
    HYBRID,
    has_mixed,
    limit_pages,
    make_engine,
    make_params,
    make_requests,
    record_dispatches,
    run,
    run_one_by_one,
    run_with_behavior,
    trainer_logps,
)

GREEDY = SamplingConfig(temperature=0.0)
SAMPLINGS = [
    GREEDY,
    SamplingConfig(),
    SamplingConfig(temperature=0.5),
    SamplingConfig(top_p=0.8, top_k=5),
]


def small(family: str, **changes):
    """A model with a vocabulary of eight: its samples repeat all the time."""
    cfg = dataclasses.replace(FAMILIES[family], V=8, **changes)
    return cfg, make_params(cfg)


def mixed(n: int, **kw):
    """Requests with different sampling parameters, two samples per prompt."""
    requests = make_requests(n, V=8, **{"max_tokens": 40, "ignore_stop": True} | kw)
    return [
        dataclasses.replace(request, sampling=SAMPLINGS[i % len(SAMPLINGS)])
        for i, request in enumerate(requests)
    ]


def one_by_one(cfg, **changes):
    return make_engine(cfg, **changes)


def speculating(cfg, **changes):
    return make_engine(cfg, **{"spec_tokens": 4} | changes)


def draft_by_hand(tokens: list[int], n_drafts: int, n_gram: int) -> list[int]:
    """Reference: a search over all positions."""
    best, place = 0, -1
    for j in range(len(tokens) - 1):
        n = 0
        while n < n_gram and n <= j and tokens[j - n] == tokens[-1 - n]:
            n += 1
        if n and n >= best:
            best, place = n, j
    if not best:
        return [-1] * n_drafts
    row = list(tokens)
    for i in range(n_drafts):  # the draft repeats: its own tokens may be read
        row.append(row[place + 1 + i])
    return row[len(tokens) :]


@pytest.mark.parametrize("n_gram", [1, 3])
def test_drafts_follow_the_latest_occurrence_of_the_longest_suffix(n_gram):
    rng = np.random.default_rng(0)
    history = rng.integers(0, 3, (200, 24)).astype(np.int32)
    history[:20] = np.arange(24)  # nothing repeats
    position = rng.integers(0, 24, 200).astype(np.int32)
    found = np.asarray(
        propose_drafts(jnp.array(history), jnp.array(position), SpeculationConfig(5, n_gram))
    )
    want = [
        draft_by_hand(row[: p + 1].tolist(), 5, n_gram)
        for row, p in zip(history, position, strict=True)
    ]
    np.testing.assert_array_equal(found, want)
    assert np.all(found[:20] == -1) and np.mean(found[20:] >= 0) > 0.8
    assert np.all(
        propose_drafts(jnp.array(history), jnp.full(200, -1), SpeculationConfig(5, n_gram)) == -1
    )


@pytest.mark.thorough
@pytest.mark.bitwise
def test_tokens_and_logprobs_are_bitwise_those_of_decoding_one_by_one(one_device):
    cfg, params = small("llama")
    requests = mixed(10)
    plain, ours = one_by_one(cfg), speculating(cfg)
    want = run_with_behavior(plain, params, requests)
    assert run_with_behavior(ours, params, requests) == want
    assert any(logps != behavior for _, logps, behavior, _ in want)  # some requests filter
    stats, before = ours.take_stats(), plain.take_stats()
    assert 0 < stats.n_accepted_tokens < stats.n_draft_tokens
    assert stats.n_tokens == before.n_tokens and stats.n_steps < 0.8 * before.n_steps


@pytest.mark.thorough
def test_repetitive_text_takes_one_pass_for_several_tokens(one_device):
    """With greedy sampling the model loops; from then on every draft token is accepted."""
    cfg, params = small("llama")
    requests = make_requests(4, V=8, sampling=GREEDY, ignore_stop=True, max_tokens=100)
    engine = speculating(cfg)
    assert run(engine, params, requests) == run(one_by_one(cfg), params, requests)
    stats = engine.take_stats()
    assert stats.n_steps < 0.5 * 100 and stats.n_accepted_tokens > 0.6 * stats.n_draft_tokens


@pytest.mark.bitwise
def test_logprobs_of_accepted_drafts_are_bitwise_the_trainers(llama):
    cfg, params = llama
    requests = make_requests(4, sampling=GREEDY, ignore_stop=True, max_tokens=100)
    engine = speculating(cfg)
    results = run(engine, params, requests)
    assert engine.take_stats().n_accepted_tokens > 100
    for (_, logps, _), row in zip(
        results, trainer_logps(cfg, params, requests, results), strict=True
    ):
        np.testing.assert_array_equal(np.array(logps, np.float32), row)


@pytest.mark.thorough
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_full_pools_and_conversations_change_no_result(one_device, kv_dtype):
    cfg, params = small("llama")
    requests = mixed(8, max_tokens=100)
    want = run(one_by_one(cfg, kv_dtype=kv_dtype), params, requests)
    tight = speculating(cfg, kv_dtype=kv_dtype)
    taken = limit_pages(tight, 7)
    assert run(tight, params, requests) == want
    assert tight.take_stats().n_preempted > 0
    assert tight.scheduler.pool.n_used == len(taken)
    more = [
        dataclasses.replace(r, tokens=np.concatenate([r.tokens, made], dtype=np.int32)[:200])
        for r, (made, _, _) in zip(requests, want, strict=True)
    ]
    more = [dataclasses.replace(r, max_tokens=30) for r in more]
    assert run(tight, params, more) == run(one_by_one(cfg, kv_dtype=kv_dtype), params, more)
    assert tight.take_stats().n_cached_tokens > 0


@pytest.mark.thorough
def test_a_stop_token_in_an_accepted_draft_ends_the_response(one_device):
    cfg, params = small("llama")
    request = make_requests(1, V=8, sampling=GREEDY, ignore_stop=True, max_tokens=60)[0]
    circle = run(one_by_one(cfg), params, [request])[0][0]
    grown = np.concatenate([request.tokens, circle], dtype=np.int32)
    for stop in sorted(set(circle[-12:])):
        sampling = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
        again = dataclasses.replace(
            request, tokens=grown, ignore_stop=False, sampling=sampling, max_tokens=20
        )
        engine = speculating(cfg)
        made = run(engine, params, [again])
        assert made == run(one_by_one(cfg), params, [again])
        assert engine.take_stats().n_steps == 1 and made[0][2] == "stop"


@pytest.mark.thorough
@pytest.mark.parametrize("n_prompt", [1, 2, 63, 64, 65, 128])
def test_all_lengths_and_page_boundaries_give_the_same(one_device, n_prompt):
    cfg, params = small("llama")
    tokens = np.arange(n_prompt, dtype=np.int32) % 3 + 2
    base = make_requests(1, V=8, ignore_stop=True)[0]
    requests = [
        dataclasses.replace(base, tokens=tokens, sample=i, max_tokens=n)
        for i, n in enumerate((1, 2, 3, 5, 64, 256 - n_prompt))  # 256: max_len of the engine
    ]
    ours, want = (run(make(cfg), params, requests) for make in (speculating, one_by_one))
    assert ours == want
    assert [len(made) for made, _, _ in ours] == [r.max_tokens for r in requests]


@pytest.mark.thorough
@pytest.mark.parametrize("family", [pytest.param("gemma3", marks=pytest.mark.slow), "qwen3_moe"])
def test_windows_experts_and_stacked_layers_give_the_same(one_device, family):
    cfg, params = small(family, stacked=family == "qwen3_moe")
    requests = mixed(4, max_tokens=30)
    ours, want = (run(make(cfg), params, requests) for make in (speculating, one_by_one))
    for (tokens, logps, _), (want_tokens, want_logps, _) in zip(ours, want, strict=True):
        assert tokens == want_tokens
        np.testing.assert_allclose(logps, want_logps, atol=1e-5)


def small_hybrid(*, stacked: bool = True):
    """A model with states and a vocabulary of eight."""
    cfg = dataclasses.replace(HYBRID, V=8, stacked=stacked)
    return cfg, make_params(cfg, 2.0)


def assert_close(results, wanted, atol=1e-5):
    for (tokens, logps, finish), want in zip(results, wanted, strict=True):
        assert (tokens, finish) == (want[0], want[2])
        np.testing.assert_allclose(logps, want[1], atol=atol)


@pytest.mark.thorough
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
def test_states_advance_over_the_accepted_tokens_alone(one_device, stacked):
    cfg, params = small_hybrid(stacked=stacked)
    requests = mixed(10, max_tokens=60)
    ours = speculating(cfg)
    results = run(ours, params, requests)
    assert_close(results, run(one_by_one(cfg), params, requests))
    stats = ours.take_stats()
    assert 0.05 * stats.n_draft_tokens < stats.n_accepted_tokens < 0.95 * stats.n_draft_tokens
    [plain] = trainer_logps(cfg, params, requests[:1], results[:1])
    np.testing.assert_allclose(results[0][1], plain, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("n_prompt", [2, 63, 64, 65])
def test_states_at_all_lengths_and_page_boundaries(one_device, n_prompt):
    cfg, params = small_hybrid()
    base = make_requests(1, V=8, ignore_stop=True)[0]
    tokens = np.arange(n_prompt, dtype=np.int32) % 3 + 2
    requests = [
        dataclasses.replace(base, tokens=tokens, sample=i, max_tokens=n)
        for i, n in enumerate((1, 2, 3, 5, 64, 256 - n_prompt))
    ]
    ours, want = (run(make(cfg), params, requests) for make in (speculating, one_by_one))
    assert_close(ours, want)
    assert [len(made) for made, _, _ in ours] == [r.max_tokens for r in requests]


@pytest.mark.thorough
def test_states_of_preempted_sequences_later_turns_and_mixed_dispatches(one_device):
    """Preempted sequences and turns start from the states that speculation leaves."""
    cfg, params = small_hybrid()
    sizes = dict(max_num_seqs=4, n_pages=32, max_num_batched_tokens=128, state_snapshots=8)
    requests = mixed(8, max_tokens=100)
    tight, plain = speculating(cfg, **sizes), one_by_one(cfg, **sizes)
    taken = limit_pages(tight, 7)
    want = run(plain, params, requests)
    results = run_one_by_one(tight, params, requests)
    assert_close(results, want)
    assert tight.take_stats().n_preempted > 0
    tight.scheduler.pool.release(taken)
    [scheduler] = tight.scheduler.schedulers
    assert scheduler.pool.n_used == 0 and scheduler.states.n_used == 0
    more = [
        dataclasses.replace(
            r, tokens=np.concatenate([r.tokens, made], dtype=np.int32)[:200], max_tokens=30
        )
        for r, (made, _, _) in zip(requests, want, strict=True)
    ]
    dispatched = record_dispatches(tight)
    assert_close(run_one_by_one(tight, params, more), run(plain, params, more))
    assert tight.take_stats().n_cached_tokens > 0 and has_mixed(dispatched)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rules", "sizes"),
    [(DECODE, dict(fsdp=2, tensor=2)), (REPLICAS, dict(replica=2, tensor=2))],
    ids=["tensor", "replicas"],
)
def test_states_on_a_mesh_give_the_tokens_of_one_device(rules, sizes):
    requests = mixed(6)
    with jax.set_mesh(make_mesh()):
        cfg, params = small_hybrid()
        want = run(one_by_one(cfg), params, requests)
    with jax.set_mesh(make_mesh(**sizes)):
        engine = speculating(cfg, rules=rules)
        ours = run(engine, small_hybrid()[1], requests)
    assert engine.take_stats().n_accepted_tokens > 0
    assert_close(ours, want, atol=1e-4)


@pytest.mark.parametrize(
    ("rules", "sizes"),
    [
        pytest.param(DECODE, dict(fsdp=2, tensor=2), marks=pytest.mark.slow),
        pytest.param(REPLICAS, dict(replica=2, tensor=2), marks=pytest.mark.thorough),
    ],
)
def test_a_mesh_gives_the_tokens_of_one_device(rules, sizes):
    requests = mixed(6)
    with jax.set_mesh(make_mesh()):
        cfg, params = small("llama")
        want = run(one_by_one(cfg), params, requests)
    with jax.set_mesh(make_mesh(**sizes)):
        engine = speculating(cfg, rules=rules)
        ours = run(engine, small("llama")[1], requests)
    assert engine.take_stats().n_accepted_tokens > 0
    for (tokens, logps, _), (want_tokens, want_logps, _) in zip(ours, want, strict=True):
        assert tokens == want_tokens
        np.testing.assert_allclose(logps, want_logps, atol=1e-4)


@pytest.mark.thorough
def test_nothing_compiles_after_warmup(one_device):
    cfg, params = small("llama")
    compiled = []

    def listener(name, seconds, **_):
        if "backend_compile" in name:
            compiled.append(name)

    engine = speculating(cfg)
    engine.warmup(params)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        run(engine, params, mixed(11))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == []


@pytest.mark.thorough
def test_samples_have_the_distribution_of_the_model(one_device):
    """Pairs of first tokens of many responses against p(a) p(b | a).

    The draft token for the first is often accepted: then the second was sampled in the same pass.
    """
    cfg, params = small("llama")
    prompt = np.array([2, 3, 4, 2, 3, 4, 2, 3], np.int32)
    base = dataclasses.replace(make_requests(1, V=8)[0], tokens=prompt, max_tokens=2)
    n = 1600
    requests = [dataclasses.replace(base, sample=i, ignore_stop=True) for i in range(n)]
    engine = speculating(cfg)
    pairs = np.array([made for made, _, _ in run(engine, params, requests)])
    stats = engine.take_stats()
    assert 0.02 * n < stats.n_accepted_tokens < 0.98 * stats.n_draft_tokens

    rows = np.array([[*prompt, a] for a in range(8)], np.int32)
    rows = np.pad(rows, ((0, 0), (0, 64 - rows.shape[1])))
    ones, positions = np.ones_like(rows), np.tile(np.arange(64, dtype=np.int32), (8, 1))

    @jax.jit
    def logps(params, *rows):
        hidden = forward_packed(params, *rows, rules=TRAIN)
        return jax.nn.log_softmax(params.logits(hidden, TRAIN))

    spec = TRAIN.spec("batch", "time")
    arrays = [jax.device_put(a, spec) for a in (rows, ones, positions)]
    p = np.exp(np.asarray(logps(params, *arrays)))
    expected = n * (p[0, len(prompt) - 1][:, None] * p[:, len(prompt)]).reshape(-1)
    observed = np.bincount(pairs[:, 0] * 8 + pairs[:, 1], minlength=64)
    often = expected >= 5
    cells = [(observed[often], expected[often])]
    cells.append((observed[~often].sum(keepdims=True), expected[~often].sum(keepdims=True)))
    chi2 = sum(float(np.sum((o - e) ** 2 / np.maximum(e, 1e-9))) for o, e in cells)
    freedom = int(often.sum())
    assert freedom > 15
    # The 99.9 % point by Wilson and Hilferty's formula; z = 3.09.
    most = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi2 < most
