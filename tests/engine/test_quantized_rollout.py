"""Tests of the engine with int8 weights and 8-bit KV against the trainer with rounded values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.kernels.quantized import Quantized, dequantize
from jaxrl.models.kv_cache import page_bytes
from jaxrl.models.quantize import quantize_int8
from sharding import make_mesh
from tests.engine.engine_cases import (
    FAMILIES,
    limit_pages,
    make_engine,
    make_params,
    make_requests,
    run,
    trainer_logps,
)

GREEDY = SamplingConfig(temperature=0.0)


def rounded(params):
    """The dequantized parameters."""
    return jax.tree.map(dequantize, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "stacked"),
    [("llama", False), pytest.param("qwen3_moe", True, marks=pytest.mark.thorough)],
)
def test_int8_weights_give_the_trainers_logprobs_of_the_rounded_weights(
    one_device, family, stacked
):
    cfg = dataclasses.replace(FAMILIES[family], stacked=stacked)
    params = make_params(cfg)
    ours = quantize_int8(params, jnp.float32)
    requests = make_requests(4)
    results = run(make_engine(cfg), ours, requests)
    want = trainer_logps(cfg, rounded(ours), requests, results)
    exact = trainer_logps(cfg, params, requests, results)
    for (_, logps, _), row, other in zip(results, want, exact, strict=True):
        np.testing.assert_allclose(logps, row, atol=1e-4)
        assert np.max(np.abs(np.array(logps) - other)) > 1e-3  # differs from the unquantized model


def test_only_the_matrices_of_layers_are_int8(one_device):
    params = make_params(FAMILIES["qwen3_moe"])
    ours = quantize_int8(params, jnp.float32)
    layer, was = ours.layers[0], params.layers[0]
    small = [layer.attn.q.w, layer.attn.k.w, layer.attn.v.w, layer.attn.o.w]
    small += [layer.mlp.gate, layer.mlp.up, layer.mlp.down]
    assert all(w.values.dtype == jnp.int8 for w in small)
    # q: 4 heads of 16 from 64; o: 64 from 4 heads of 16; experts: 8 of 32 x 64
    shapes = [(4, 16), (2, 16), (2, 16), (64,), (8, 32), (8, 32), (8, 64)]
    assert [w.scale.shape for w in small] == shapes
    assert layer.mlp.router is was.mlp.router and ours.embed is params.embed
    assert ours.unembed is params.unembed and layer.attn_norm.w is was.attn_norm.w
    before = [leaf for leaf in jax.tree.leaves(params) if leaf.dtype == jnp.int8]
    assert not before  # the trainer's tree is unchanged


@pytest.mark.thorough
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantized_kv_gives_nearly_the_logprobs_of_float32(llama, kv_dtype):
    """Rounding errors are up to 0.4 % of a head's largest value (int8), 6 % of each value (fp8).

    Half of that at random changes the logits of this model by some hundredths.
    """
    cfg, params = llama
    requests = make_requests(6, max_tokens=60, ignore_stop=True)
    results = run(make_engine(cfg, kv_dtype=kv_dtype), params, requests)
    want = trainer_logps(cfg, params, requests, results)
    gaps = [np.abs(np.array(logps) - row) for (_, logps, _), row in zip(results, want, strict=True)]
    worst, mean = np.max(np.concatenate(gaps)), np.mean(np.concatenate(gaps))
    assert 1e-4 < worst < {"int8": 0.06, "fp8": 0.3}[kv_dtype]
    assert mean < {"int8": 0.01, "fp8": 0.05}[kv_dtype]


@pytest.mark.thorough
@pytest.mark.bitwise
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_page_has_the_same_bits_whether_shared_prefilled_or_decoded(llama, kv_dtype):
    """A full pool preempts and recomputes; a later turn finds the KV of earlier ones."""
    cfg, params = llama
    requests = make_requests(8, max_tokens=100, ignore_stop=True)
    results = run(make_engine(cfg, kv_dtype=kv_dtype), params, requests)
    tight = make_engine(cfg, kv_dtype=kv_dtype)
    limit_pages(tight, 7)
    assert run(tight, params, requests) == results
    assert tight.take_stats().n_preempted > 0
    more = [
        dataclasses.replace(
            r, tokens=np.concatenate([r.tokens, made], dtype=np.int32)[:150], max_tokens=20
        )
        for r, (made, _, _) in zip(requests, results, strict=True)
    ]
    alone = make_engine(cfg, kv_dtype=kv_dtype, prefix_cache=False)
    tight.take_stats()
    assert run(tight, params, more) == run(alone, params, more)
    assert tight.take_stats().n_cached_tokens > alone.take_stats().n_cached_tokens


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_mesh_gives_the_results_of_one_device(family):
    cfg = FAMILIES[family]
    requests = make_requests(4, sampling=GREEDY)
    sizes = dict(fsdp=2, tensor=2) if family == "llama" else dict(expert=2, tensor=2)
    found = []
    for mesh in (make_mesh(), make_mesh(**sizes)):
        with jax.set_mesh(mesh):
            engine = make_engine(cfg, kv_dtype="int8")
            found.append(run(engine, quantize_int8(make_params(cfg), jnp.float32), requests))
            spec = jax.typeof(engine.runner.cache.k.scale[0]).sharding.spec
    assert spec[1] == "tensor"  # each device holds its own heads' scales
    for (tokens, logps, _), (want_tokens, want_logps, _) in zip(*found, strict=True):
        assert tokens == want_tokens
        np.testing.assert_allclose(logps, want_logps, atol=2e-3)  # a value may round the other way


def test_the_size_of_quantized_pages_includes_their_scales(llama):
    cfg, _ = llama
    engine = make_engine(cfg, kv_dtype="fp8", n_pages=5)
    # keys and values, 2 layers, 2 heads, 64 tokens: 16 bytes and a float32
    assert page_bytes(cfg, 64, engine.pool.dtype) == {0: 2 * 2 * 2 * 64 * (16 + 4)}
    pool = engine.runner.allocated_cache()
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) == 5 * 10240
