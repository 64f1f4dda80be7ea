"""Tests of engines of models with states: gated DeltaNet next to attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.engine.pages import OutOfPages
from jaxrl.engine.states import StateSlots
from jaxrl.models.config import LoRA
from jaxrl.models.kv_cache import slot_bytes
from jaxrl.models.lora import merge
from sharding import make_mesh
from tests.engine.engine_cases import (
    HYBRID,
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
from tests.engine.test_adapters import (
    assert_close,
    by_adapter,
    mixed_requests,
    stack,
    with_adapter,
)
from tests.engine.test_prefix_reuse import conversation
from tests.engine.test_replicas import generate_on

GREEDY = SamplingConfig(temperature=0.0)
SIZES: dict[str, Any] = {"max_num_seqs": 4, "n_pages": 16, "steps_per_dispatch": 4}


@pytest.fixture
def hybrid(one_device):
    return make_params(HYBRID, 2.0)


def assert_equal(results, wanted, atol=1e-5):
    for (tokens, logps, finish), want in zip(results, wanted, strict=True):
        assert (tokens, finish) == (want[0], want[2])
        np.testing.assert_allclose(logps, want[1], atol=atol)


def assert_trainers(params, requests, results, cfg=HYBRID):
    want = trainer_logps(cfg, params, requests, results)
    for (_, logps, _), row in zip(results, want, strict=True):
        np.testing.assert_allclose(logps, row, atol=1e-5)
        assert np.min(row) < -1


@pytest.mark.thorough
def test_logprobs_are_the_trainers_with_shared_prompts_preemption_and_few_snapshots(hybrid):
    requests = make_requests(6, max_tokens=40, ignore_stop=True)
    engine = make_engine(HYBRID, **SIZES, state_snapshots=1)
    taken = limit_pages(engine, 6)
    results = run(engine, hybrid, requests)
    assert_trainers(hybrid, requests, results)
    stats = engine.take_stats()
    assert stats.n_preempted > 0 and stats.n_cached_tokens > 0
    engine.scheduler.pool.release(taken)
    [scheduler] = engine.scheduler.schedulers
    assert scheduler.pool.n_used == 0 and scheduler.states.n_used == 0


@pytest.mark.thorough
def test_a_round_that_is_ahead_is_kept_when_weights_change(hybrid):
    """States cannot go back: its tokens have the old version, and are returned next."""
    engine, requests = make_engine(HYBRID, **SIZES), make_requests(2, max_tokens=60)
    slots = [engine.submit(dataclasses.replace(r, ignore_stop=True)) for r in requests]
    made = {slot: ([], []) for slot in slots}
    while engine.n_unfinished:
        for out in engine.generate(hybrid):
            made[out.slot][0].extend(out.tokens.tolist())
            made[out.slot][1].extend([out.version] * len(out.tokens))
        engine.set_version(1)  # for the first time after the first round
    want = run(make_engine(HYBRID, **SIZES), hybrid, requests)
    steps = engine.rollout.steps_per_dispatch
    for slot, (tokens, _, _) in zip(slots, want, strict=True):
        assert made[slot][0][: len(tokens)] == tokens
        assert made[slot][1] == [0] * 2 * steps + [1] * (60 - 2 * steps)


@pytest.mark.thorough
def test_layers_in_a_list_and_in_stacks_give_the_same(hybrid):
    requests = make_requests(4)
    cfg = dataclasses.replace(HYBRID, stacked=False)
    params = make_params(cfg, 2.0)
    results = run(make_engine(cfg, **SIZES), params, requests)
    assert_trainers(params, requests, results, cfg)


@pytest.mark.thorough
def test_turns_of_a_conversation_go_on_from_its_last_state(hybrid):
    sizes: Any = SIZES | dict(state_snapshots=8)
    kept, alone = make_engine(HYBRID, **sizes), make_engine(HYBRID, **sizes, prefix_cache=False)
    turns, want = conversation(kept, hybrid), conversation(alone, hybrid)
    for (requests, results), (_, plain) in zip(turns, want, strict=True):
        assert_equal(results, plain)
        assert_trainers(hybrid, requests, results)
    n_tokens = sum(len(r.tokens) - 1 for requests, _ in turns for r in requests)
    stats = kept.take_stats()
    assert alone.take_stats().n_prefill_tokens == n_tokens
    # A turn computes the last sampled token and its 5 or 6 new ones, except its last.
    first = sum(len(r.tokens) - 1 for r in turns[0][0])
    assert stats.n_prefill_tokens == first + sum(5 + turn for turn in range(2) for _ in range(3))


@pytest.mark.thorough
def test_a_shared_beginning_is_computed_twice_and_then_reused(hybrid):
    """The second prompt finds pages without a state, and leaves one for the third."""
    random = np.random.default_rng(0)
    shared = random.integers(2, 512, 130, dtype=np.int32)
    [request] = make_requests(1, max_tokens=5)
    requests = [
        dataclasses.replace(
            request, tokens=np.concatenate([shared, random.integers(2, 512, 9, dtype=np.int32)])
        )
        for _ in range(3)
    ]
    engine, computed = make_engine(HYBRID, **SIZES), []
    for r in requests:
        assert_trainers(hybrid, [r], run(engine, hybrid, [r]))
        computed.append(engine.take_stats().n_prefill_tokens)
    assert computed == [138, 138, 138 - 128]


@pytest.mark.thorough
def test_prompts_in_chunks_next_to_decode_give_the_same(hybrid):
    requests = make_requests(6, n_samples=1, max_tokens=30)
    sizes: Any = SIZES | dict(max_num_batched_tokens=128)
    engine = make_engine(HYBRID, **sizes)
    dispatched = record_dispatches(engine)
    results = run_one_by_one(engine, hybrid, requests)
    assert has_mixed(dispatched)
    assert_trainers(hybrid, requests, results)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [dict(tensor=2), dict(fsdp=2, tensor=2)])
def test_a_mesh_gives_the_results_of_one_device(sizes):
    requests = make_requests(6, sampling=GREEDY)
    with jax.set_mesh(make_mesh()):
        want = run(make_engine(HYBRID, **SIZES), make_params(HYBRID, 2.0), requests)
    with jax.set_mesh(make_mesh(**sizes)):
        results = run_one_by_one(make_engine(HYBRID, **SIZES), make_params(HYBRID, 2.0), requests)
    assert_equal(results, want, atol=1e-4)


@pytest.mark.thorough
def test_replicas_have_their_own_states():
    requests = make_requests(8, sampling=GREEDY)
    with jax.set_mesh(make_mesh()):
        want = run(make_engine(HYBRID, **SIZES), make_params(HYBRID), requests)
    train: Any = dict(fsdp=4)
    rollout: Any = dict(replica=2, tensor=2)
    results, engine, _ = generate_on(HYBRID, requests, train=train, rollout=rollout, **SIZES)
    assert_equal(results, want, atol=1e-4)
    assert len(engine.scheduler.schedulers) == 2


@pytest.mark.thorough
def test_each_request_has_the_states_of_its_adapter(one_device, tmp_path):
    base = make_params(HYBRID, 2.0)
    targets = ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj")
    models = [with_adapter(base, LoRA(4, 8.0, targets=targets), seed) for seed in range(2)]
    stacked = stack(base, models, tmp_path)
    requests = mixed_requests(sampling=GREEDY)
    results = run(make_engine(stacked.cfg, **SIZES), stacked, requests)
    merged = [base, *map(merge, models)]
    assert_close(results, by_adapter(make_engine(base.cfg, **SIZES), merged, requests))


@pytest.mark.thorough
def test_new_weights_start_from_no_old_state(hybrid):
    requests = make_requests(2)
    engine = make_engine(HYBRID, **SIZES)
    run(engine, hybrid, requests)
    new = jax.tree.map(lambda w: w * 1.1, hybrid)
    engine.set_version(1)
    assert_trainers(new, requests, run(engine, new, requests))


@pytest.mark.thorough
def test_inserted_prefixes_start_from_their_state(hybrid):
    [request, other] = make_requests(2, n_samples=1, sampling=GREEDY)
    want = run(make_engine(HYBRID, **SIZES), hybrid, [request])
    engine = make_engine(HYBRID, **SIZES)
    prefix = engine.prefill(hybrid, request.tokens)
    run(engine, hybrid, [other])  # its state takes another slot
    made = {engine.insert(prefix, request): [] for _ in range(2)}
    engine.release_prefix(prefix)
    while engine.n_unfinished:
        for out in engine.generate(hybrid):
            made[out.slot] += out.tokens.tolist()
    assert list(made.values()) == [want[0][0]] * 2


def test_pools_that_do_not_fit_name_the_slots(one_device, monkeypatch):
    engine = make_engine(HYBRID, n_pages=0)
    monkeypatch.setattr(type(engine.pool), "_n_pages_that_fit", lambda *_: 1)
    with pytest.raises(ValueError, match=r"next to 13 states of .*max_num_seqs \(8\)"):
        _ = engine.scheduler


def test_slot_bytes_are_those_of_the_arrays(one_device):
    pool = make_engine(HYBRID, **SIZES).pool
    states = pool.allocate(2).states
    assert sum(a.nbytes for a in jax.tree.leaves(states)) == pool.n_slots * slot_bytes(
        HYBRID, jnp.float32
    )


def test_the_oldest_snapshot_makes_room():
    states = StateSlots(4)
    a, b, _ = (states.allocate() for _ in range(3))
    with pytest.raises(OutOfPages, match="all 3 slots of state"):
        states.allocate()
    states.keep(a, 7, b"x")
    states.keep(b, 7, b"xy")
    assert states.longest(7, b"xyz", ()) == (b"xy", b)
    assert states.longest(7, b"xyz", {b}) == (b"x", a)
    states.use(a)
    assert states.allocate(pinned={a}) == b and states.longest(7, b"xyz", ()) == (b"x", a)
    with pytest.raises(OutOfPages):
        states.allocate(pinned={a})
    states.forget(7)
    assert states.longest(7, b"xyz", ()) is None and states.allocate() == a
