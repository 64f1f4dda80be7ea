"""Tests of replicas.py: data-parallel replicas on a separate mesh, with resharded weights."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import partition_specs
from sharding import REPLICAS, make_mesh, reshape_mesh
from tests.engine.engine_cases import (
    FAMILIES,
    has_mixed,
    make_engine,
    make_params,
    make_requests,
    record_dispatches,
    run,
    run_one_by_one,
)

GREEDY = SamplingConfig(temperature=0.0)


def generate_on(cfg, requests, *, train: dict, rollout: dict, **changes):
    """(results, engine, its dispatches) on the mesh `rollout`, with weights of the mesh `train`."""
    with jax.set_mesh(make_mesh(**train)):
        params = make_params(cfg)
        way = reshape_mesh(jax.sharding.get_mesh(), **rollout)
    specs = partition_specs(decoder_specs(cfg), REPLICAS)
    with jax.set_mesh(way.mesh):
        engine = make_engine(cfg, rules=REPLICAS, **changes)
        dispatched = record_dispatches(engine)
        results = run_one_by_one(engine, way.reshard(params, specs), requests)
    return results, engine, dispatched


def assert_same(results, want):
    for (tokens, logps, finish), (want_tokens, want_logps, want_finish) in zip(
        results, want, strict=True
    ):
        assert (tokens, finish) == (want_tokens, want_finish)
        np.testing.assert_allclose(logps, want_logps, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "train", "rollout"),
    [
        pytest.param(
            "llama",
            dict(fsdp=2, tensor=2),
            dict(replica=2, tensor=2),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "llama",
            dict(fsdp=4, tensor=2),
            dict(replica=4, tensor=2),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "gemma3",  # pages by window, joined in one pool
            dict(fsdp=2, tensor=2),
            dict(replica=2, tensor=2),
            marks=pytest.mark.thorough,
        ),
        pytest.param("llama", dict(fsdp=8), dict(replica=8), marks=pytest.mark.slow),
        pytest.param(
            "mixtral", dict(fsdp=2, expert=2), dict(replica=2, expert=2), marks=pytest.mark.slow
        ),
    ],
)
def test_replicas_give_the_results_of_one_device(family, train, rollout):
    cfg = dataclasses.replace(FAMILIES[family], stacked=family == "gemma3")
    requests = make_requests(10, sampling=GREEDY)
    with jax.set_mesh(make_mesh()):
        want = run(make_engine(cfg), make_params(cfg), requests)
    results, _, dispatched = generate_on(cfg, requests, train=train, rollout=rollout)
    assert_same(results, want)
    assert has_mixed(dispatched)


def test_requests_are_distributed_evenly_with_the_samples_of_a_prompt_together():
    cfg = FAMILIES["llama"]
    requests = make_requests(12, n_samples=3)
    with jax.set_mesh(make_mesh(replica=4)):
        engine = make_engine(cfg, rules=REPLICAS, n_pages=64)
        slots = [engine.submit(r) for r in requests]
        plans = engine.scheduler.plan()
        prompts = [[seq.request.prompt_id for seq in plan.decode] for plan in plans]
        assert prompts == [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3]]
        assert engine.scheduler.n_unfinished == 12 and len(set(slots)) == 12
        for slot in slots:
            engine.free(slot)
        with pytest.raises(KeyError):
            engine.free(slots[0])
        assert engine.scheduler.n_unfinished == 0
        assert engine.scheduler.n_pages_used == 0


@pytest.mark.thorough
def test_a_prefix_is_used_by_the_replica_that_holds_it():
    """Two prefilled prompts are on two replicas; their samples are those of submitted requests."""
    cfg = FAMILIES["llama"]
    requests = make_requests(4, sampling=GREEDY)
    mesh = reshape_mesh(make_mesh(fsdp=2, tensor=2), replica=2, tensor=2).mesh
    with jax.set_mesh(mesh):
        params, engine = make_params(cfg), make_engine(cfg, rules=REPLICAS, n_pages=32)
        want = run(engine, params, requests)
        prefixes = [engine.prefill(params, r.tokens) for r in requests[::2]]
        assert {prefix.replica for prefix in prefixes} == {0, 1}
        slots = [engine.insert(prefixes[i // 2], r) for i, r in enumerate(requests)]
        found = {slot: [] for slot in slots}
        while engine.n_unfinished:
            for made in engine.generate(params):
                found[made.slot] += made.tokens.tolist()
        for prefix in prefixes:
            engine.release_prefix(prefix)
        assert engine.scheduler.n_pages_used == 0
    assert [found[slot] for slot in slots] == [tokens for tokens, _, _ in want]
