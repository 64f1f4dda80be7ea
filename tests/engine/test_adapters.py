"""Adapters in the engine: unmerged as in training, merged, and several in one batch.

Tests of jaxrl/models/adapter_stack.py, jaxrl/models/files/adapter_stack.py and their use in
jaxrl/engine.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.models.config import LoRA
from jaxrl.models.files.adapter import save_adapter
from jaxrl.models.files.adapter_stack import stack_adapters
from jaxrl.models.lora import add_adapters, combine, merge, split
from sharding import make_mesh
from sharding.rules import DECODE, REPLICAS, TRAIN
from tests.engine.engine_cases import (
    FAMILIES,
    has_mixed,
    make_engine,
    make_params,
    make_requests,
    record_dispatches,
    run,
    run_one_by_one,
    trainer_logps,
)
from tests.marks import graded

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Ranks, scales and layers differ; a scale of 2 is exact in float32.
ADAPTERS = (LoRA(4, 8.0, targets=ALL), LoRA(8, 16.0, targets=("q_proj", "down_proj")))
DORA = dataclasses.replace(ADAPTERS[1], dora=True)
# Two adapters that one engine mixes, by family: with tables, magnitudes and experts.
MIXED = {
    "qwen2": ADAPTERS,
    "llama": (LoRA(4, 8.0, targets=(*ALL, "embed_tokens", "lm_head")), DORA),
    "qwen3_moe": (ADAPTERS[0], dataclasses.replace(DORA, targets=ALL[:4])),
}
GREEDY = SamplingConfig(temperature=0.0)


def with_adapter(base, lora, seed):
    """The base with an adapter that changes the logits much."""
    model = add_adapters(base, lora, seed=seed, rules=TRAIN, dtype=jnp.float32)
    trained, frozen = split(model)
    rng = np.random.default_rng(seed)

    def values(leaf):
        return jax.device_put(rng.normal(0, 0.2, leaf.shape).astype(np.float32), leaf.sharding)

    return combine(jax.tree.map(values, trained), frozen)


def adapted(base):
    return [with_adapter(base, lora, seed) for seed, lora in enumerate(MIXED[base.cfg.family])]


def stack(base, models, folder, rules=DECODE):
    """The base with the adapters of all models, through files of PEFT's format."""
    folders = [folder / str(i) for i in range(len(models))]
    for path, model in zip(folders, models, strict=True):
        save_adapter(path, model, base="base")
    return stack_adapters(base, folders, rules=rules, dtype=jnp.float32)


def mixed_requests(n=9, **kw):
    """Requests of the base and both adapters in turn, of prompts that they share."""
    requests = make_requests(n, n_samples=3, **kw)
    return [dataclasses.replace(r, adapter=i % 3) for i, r in enumerate(requests)]


def by_adapter(engine, models, requests):
    """The results of each request from the merged model of its adapter, on one engine."""
    found = []
    for version, model in enumerate(models):
        engine.set_version(version)
        own = [dataclasses.replace(r, adapter=0) for r in requests if r.adapter == version]
        found.append(iter(run(engine, model, own)))
    return [next(found[r.adapter]) for r in requests]


def assert_close(results, wanted):
    for (tokens, logps, finish), want in zip(results, wanted, strict=True):
        assert (tokens, finish) == (want[0], want[2])
        np.testing.assert_allclose(logps, want[1], atol=2e-4)


@pytest.fixture
def llama(one_device, tmp_path):
    """(base, merged models of the base and of each adapter, the stack)."""
    base = make_params(FAMILIES["llama"])
    models = adapted(base)
    return base, [base, *map(merge, models)], stack(base, models, tmp_path)


@pytest.mark.thorough
def test_a_mixed_batch_gives_every_request_the_numbers_of_its_adapter(llama):
    base, merged, stacked = llama
    requests = mixed_requests(sampling=GREEDY)
    results = run(make_engine(stacked.cfg), stacked, requests)
    assert_close(results, by_adapter(make_engine(base.cfg), merged, requests))
    assert len({tuple(tokens) for tokens, _, _ in results[:3]}) == 3  # one prompt, three models


@pytest.mark.bitwise
@pytest.mark.thorough
def test_results_do_not_depend_on_the_other_adapters_of_a_batch(llama):
    base, _, stacked = llama
    requests = mixed_requests()
    results = run(make_engine(stacked.cfg), stacked, requests)
    for adapter in range(3):
        own = [(r, out) for r, out in zip(requests, results, strict=True) if r.adapter == adapter]
        assert run(make_engine(stacked.cfg), stacked, [r for r, _ in own]) == [o for _, o in own]
    own = [r for r in requests if r.adapter == 0]
    assert run(make_engine(base.cfg), base, own) == results[::3]  # as without any adapter


@pytest.mark.bitwise
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", ADAPTERS[0]),
        ("llama", LoRA(4, 8.0, targets=(*ALL, "embed_tokens", "lm_head"))),
        ("qwen3_moe", LoRA(4, 6.0, targets=ALL)),  # a scale of 1.5
        ("qwen2", ADAPTERS[0]),
        ("gemma2", ADAPTERS[0]),
        ("llama", LoRA(4, 8.0, targets=ALL, dora=True)),
    ],
    ids=str,
)
def test_unmerged_logprobs_are_bitwise_the_trainers(one_device, family, lora):
    model = with_adapter(make_params(FAMILIES[family]), lora, 0)
    requests = make_requests(8)
    results = run(make_engine(model.cfg), model, requests)
    want = trainer_logps(model.cfg, model, requests, results)
    for (_, logps, _), row in zip(results, want, strict=True):
        np.testing.assert_array_equal(np.array(logps, np.float32), row)


@pytest.mark.thorough
def test_the_prefix_cache_is_that_of_an_adapter(llama):
    _, _, stacked = llama
    prompt = np.arange(2, 140, dtype=np.int32)
    request = dataclasses.replace(make_requests(1, sampling=GREEDY)[0], tokens=prompt)
    requests = [dataclasses.replace(request, adapter=i) for i in (0, 1, 2)]
    alone = [run(make_engine(stacked.cfg), stacked, [r])[0] for r in requests]
    engine = make_engine(stacked.cfg)
    for r, want in zip(requests, alone, strict=True):
        assert run(engine, stacked, [r]) == [want]
        assert engine.take_stats().n_cached_tokens == 0
    for r, want in zip(requests, alone, strict=True):
        assert run(engine, stacked, [r]) == [want]
        assert engine.take_stats().n_cached_tokens == len(prompt) - 1
    prefix = engine.prefill(stacked, prompt, 1)
    with pytest.raises(ValueError, match="tokens or adapter differ"):
        engine.insert(prefix, requests[2])
    engine.insert(prefix, requests[1])
    engine.release_prefix(prefix)
    tokens = np.concatenate([out.tokens for _ in range(3) for out in engine.generate(stacked)])
    assert tokens.tolist() == alone[1][0]


@pytest.mark.parametrize(
    ("family", "options", "layers"),
    graded(
        [
            ("qwen2", dict(spec_tokens=3), "list"),
            ("qwen3_moe", {}, "list"),
            ("llama", {}, "stacked"),
        ],
        thorough=[("qwen2", dict(spec_tokens=3), "list")],
    ),
    ids=str,
)
def test_every_program_mixes_adapters(one_device, tmp_path, family, options, layers):
    cfg = dataclasses.replace(FAMILIES[family], stacked=layers == "stacked")
    base = make_params(cfg)
    models = adapted(base)
    stacked = stack(base, models, tmp_path)
    requests = mixed_requests(sampling=GREEDY)
    results = run(make_engine(stacked.cfg, **options), stacked, requests)
    assert_close(results, by_adapter(make_engine(cfg), [base, *map(merge, models)], requests))


@pytest.mark.thorough
def test_prefill_mixed_with_decode_keeps_the_adapters_apart(llama):
    base, merged, stacked = llama
    requests = mixed_requests(24, sampling=GREEDY)
    engine = make_engine(stacked.cfg, max_num_batched_tokens=128, steps_per_dispatch=4)
    dispatched = record_dispatches(engine)
    results = run_one_by_one(engine, stacked, requests)
    assert has_mixed(dispatched)
    assert_close(results, by_adapter(make_engine(base.cfg), merged, requests))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "sizes", "rules"),
    [
        ("llama", dict(fsdp=2, tensor=2), DECODE),
        ("llama", dict(replica=2, tensor=2), REPLICAS),
        ("qwen3_moe", dict(expert=2, tensor=2), DECODE),
        ("qwen3_moe", dict(replica=2, expert=2), REPLICAS),
    ],
    ids=str,
)
def test_a_mesh_changes_no_result(tmp_path, family, sizes, rules):
    requests = mixed_requests(sampling=GREEDY)
    with jax.set_mesh(make_mesh()):
        base = make_params(FAMILIES[family])
        models = adapted(base)
        want = by_adapter(make_engine(base.cfg), [base, *map(merge, models)], requests)
    with jax.set_mesh(make_mesh(**sizes)):
        base = make_params(FAMILIES[family])
        stacked = stack(base, adapted(base), tmp_path, rules)
        assert_close(run(make_engine(stacked.cfg, rules=rules), stacked, requests), want)


def test_an_adapter_that_the_engine_does_not_have_is_refused(one_device):
    engine = make_engine(FAMILIES["llama"])
    with pytest.raises(ValueError, match="adapter 1 of a request is not there; the engine has 0"):
        engine.submit(mixed_requests(2)[1])
