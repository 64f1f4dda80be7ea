"""The TPU kernels compile for chips that are not attached, on training and rollout meshes."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl.config.keys import RolloutConfig
from jaxrl.engine.engine import PagedEngine
from jaxrl.kernels.attention import attention
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.paged_attention import paged_attention, write_pages
from jaxrl.kernels.ring_attention import ring_attention
from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import abstract_params
from jaxrl.planner.compiled.cost import program_cost
from jaxrl.planner.topology import topology
from sharding import DECODE, REPLICAS, RING, TRAIN, ULYSSES, make_mesh
from tests.kernels.abstract_arrays import abstract
from tests.kernels.compiled_attention import check_compiled_gradients

pytest.importorskip("libtpu", reason="the TPU compiler is not installed")


@pytest.mark.parametrize(
    ("chips", "rules", "sizes", "heads", "options"),
    [
        ("v5p:2x2x2", TRAIN, dict(fsdp=2, tensor=4), (28, 4, 128), dict()),
        ("v5p:2x2x2", TRAIN, dict(fsdp=2, tensor=4), (28, 4, 128), dict(shared=True)),
        pytest.param(
            "v5e:2x4",
            ULYSSES,
            dict(fsdp=4, sequence=2),
            (12, 2, 128),
            dict(shared=True),
            marks=pytest.mark.thorough,
        ),
        ("v6e:2x4", ULYSSES, dict(fsdp=4, sequence=2), (8, 4, 256), dict(softcap=50.0)),  # Gemma 2
        pytest.param("v6e:2x4", TRAIN, dict(fsdp=8), (9, 3, 64), dict(), marks=pytest.mark.slow),
        pytest.param(  # gpt-oss
            "v6e:2x4",
            TRAIN,
            dict(fsdp=4, tensor=2),
            (64, 8, 64),
            dict(sinks=True),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_training_attention_compiles(chips, rules, sizes, heads, options):
    mesh, shape = make_mesh(topology(chips).devices, **sizes), (4 * sizes["fsdp"], 4096)
    check_compiled_gradients(
        attention, mesh, rules=rules, shape=shape, heads=heads, block=512, **options
    )


@pytest.mark.parametrize(
    ("ulysses", "heads", "options"),
    [
        (1, (28, 4, 128), dict()),
        (2, (8, 4, 256), dict(softcap=50.0)),
        pytest.param(1, (28, 4, 128), dict(shared=True), marks=pytest.mark.thorough),
    ],
)
def test_ring_attention_compiles(ulysses, heads, options):
    check_compiled_gradients(
        ring_attention,
        make_mesh(topology("v5p:2x2x2").devices, fsdp=2, sequence=4),
        rules=dataclasses.replace(RING, ulysses=ulysses),
        shape=(2, 16384),
        heads=heads,
        block=512,
        places=4 // ulysses,
        **options,
    )


@pytest.mark.parametrize(
    ("chips", "tensor", "heads", "page_len", "T", "options"),
    [
        ("v5p:2x2x2", 4, (28, 4, 128), 128, 1, dict()),
        ("v6e:2x4", 1, (8, 4, 256), 64, 128, dict(softcap=50.0)),  # Gemma 2, prefill
        ("v5p:2x2x2", 1, (16, 1, 640), 128, 1, dict(latent=True)),  # DeepSeek-V3, tensor 8
        pytest.param(
            "v5e:2x4", 1, (128, 1, 640), 128, 128, dict(latent=True), marks=pytest.mark.thorough
        ),
        pytest.param("v6e:2x4", 1, (12, 2, 128), 64, 64, dict(), marks=pytest.mark.slow),
        pytest.param(
            "v5e:2x4", 1, (28, 4, 128), 128, 512, dict(sinks=True), marks=pytest.mark.thorough
        ),
        pytest.param(
            "v6e:2x4", 2, (16, 8, 128), 128, 1, dict(sinks=True), marks=pytest.mark.thorough
        ),
        # Prefill with much memory per row
        pytest.param("v5e:2x4", 1, (28, 4, 128), 128, 512, dict(), marks=pytest.mark.slow),
        pytest.param("v5p:2x2x2", 1, (32, 8, 128), 128, 512, dict(), marks=pytest.mark.slow),
    ],
)
def test_ragged_paged_attention_compiles(chips, tensor, heads, page_len, T, options):
    N, K, H = heads
    B, C = 64, 4096 // page_len
    mesh = make_mesh(topology(chips).devices, fsdp=8 // tensor, tensor=tensor)
    pool_shape = (2048, K, page_len, H)
    spec = AttentionSpec(0.1, options.get("softcap"), DECODE)
    with jax.set_mesh(mesh):
        q = abstract(mesh, (B, T, N, H), jnp.bfloat16, DECODE.spec(None, None, "heads"))
        pool = abstract(mesh, pool_shape, jnp.bfloat16, DECODE.spec(None, "kv_heads"))
        table, places = (jax.ShapeDtypeStruct((B, n), jnp.int32) for n in (C, T))

        sinks = None
        if options.get("sinks"):
            sinks = abstract(mesh, (N,), jnp.bfloat16, DECODE.spec("heads"))

        def step(k_pages, v_pages, q, table, places, window, sinks):
            new = q[:, :, :: (N // K)]
            values = None if v_pages is None else new
            pools = write_pages(k_pages, v_pages, new, values, table, places, rules=DECODE)
            where = dict(page_table=table, positions=places, window=window, sinks=sinks)
            return pools, paged_attention(q, *pools, spec=spec, **where)

        window = jax.ShapeDtypeStruct((), jnp.int32)
        args = pool, None if options.get("latent") else pool, q, table, places, window, sinks
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
        compiled = lowered.compile()
    (call,) = re.findall(r".* custom-call\(.*ragged_paged_attention.*", compiled.as_text())
    n_cores = 2 if chips.startswith("v5p") else 1
    assert f"s32[{n_cores + 1}]{{0}}" in call  # the limits of each core's rows
    pool_bytes = 2 * math.prod(pool_shape) / tensor  # of the keys
    assert compiled.memory_analysis().temp_size_in_bytes < pool_bytes / 2  # no copy of the pool


@pytest.mark.parametrize(
    ("chips", "kv_dtype"),
    [("v5e:2x4", "int8"), pytest.param("v6e:2x4", "fp8", marks=pytest.mark.slow)],
)
def test_an_engine_with_quantized_pages_compiles(chips, kv_dtype):
    """Uses `columns` and does not copy the pool in every layer."""
    cfg = uniform_decoder(
        "qwen2",
        L=4,
        D=256,
        N=4,
        K=2,
        H=128,
        F=512,
        V=1024,
        tied=True,
        stacked=True,
        max_len=512,
    )
    rollout = RolloutConfig(
        max_num_seqs=64, max_num_batched_tokens=512, kv_dtype=kv_dtype, page_len=128
    )
    mesh, n_pages = make_mesh(topology(chips).devices, fsdp=8), 4096
    with jax.set_mesh(mesh):
        params = abstract_params(decoder_specs(cfg), DECODE, jnp.bfloat16, mesh)
        engine = PagedEngine(cfg, rollout, rules=DECODE, dtype=jnp.bfloat16, max_len=512)
        pool = engine.pool.bytes_per_device.of_pages(n_pages)
        for kind in ("prefill", "decode"):
            compiled = engine.runner.lower_largest(params, n_pages, kind).compile()
            text = compiled.as_text()
            assert "paged_attention" in text and "ragged" not in text
            # keys and values of 4 layers, 2 heads: 128 bytes and a scale
            assert pool == 2 * 4 * 2 * 4096 * 128 * (128 + 4)
            moved = program_cost(text, lambda loop: 1.0).bytes_accessed
            assert moved < pool, kind  # the scales, a 33rd of it, are copied to another layout
            assert compiled.memory_analysis().temp_size_in_bytes < pool / 8, kind


@pytest.mark.parametrize(
    ("chips", "sizes", "dtype"),
    [
        ("v5p:2x2x1", dict(replica=2, tensor=2), ""),
        pytest.param("v5e:2x2", dict(replica=4), "int8", marks=pytest.mark.thorough),
        pytest.param("v6e:2x2", dict(expert=4), "", marks=pytest.mark.thorough),
    ],
)
def test_decode_copies_no_experts_of_stacked_layers(chips, sizes, dtype):
    E, D, F, L = 128, 1024, 384, 4  # 192 of F on each of two devices do not fill its lanes
    attention = dict(N=4, K=4, H=128, V=1024, max_len=512, stacked=True)
    cfg = uniform_decoder(
        "qwen3_moe", L=L, D=D, F=F, E=E, top_k=2, F_expert=F, base_dtype=dtype, **attention
    )
    rollout = RolloutConfig(max_num_seqs=64, max_num_batched_tokens=512, page_len=128)
    mesh = make_mesh(topology(chips).devices, **sizes)
    with jax.set_mesh(mesh):
        params = abstract_params(decoder_specs(cfg), REPLICAS, jnp.bfloat16, mesh)
        engine = PagedEngine(cfg, rollout, rules=REPLICAS, dtype=jnp.bfloat16, max_len=512)
        compiled = engine.runner.lower_largest(params, 64, "decode").compile()
        e, f = E // mesh.shape["expert"], F // mesh.shape["tensor"]
    text, one = compiled.as_text(), rf"{e},(?:{f},{D}|{D},{f})"
    assert not re.findall(rf"= \w+\[(?:1,)?{one}\].*", text)  # of one layer
    copies = rf"= \w+\[{L},{one}\]\S* (?!parameter|get-tuple-element|bitcast).*"
    assert not re.findall(copies, text)
    # gate, up and down; with 4 devices that share experts, for two numbers of rows
    n_calls = 6 if "expert" in sizes else 3
    assert len(re.findall(r" custom-call\(.*grouped_matmul_stack", text)) == n_calls
    assert compiled.memory_analysis().temp_size_in_bytes < L * e * f * D / 4


def test_rows_too_long_for_splash_use_blockwise():
    mesh = make_mesh(topology("v5p:2x2x1").devices, fsdp=4)
    with jax.set_mesh(mesh):
        for T, kernels in ((2**16, 1), (2**16 + 64, 0)):
            q = abstract(mesh, (4, T, 2, 64), jnp.bfloat16, TRAIN.spec("batch", "time"))
            rows = abstract(mesh, (4, T), jnp.int32, TRAIN.spec("batch", "time"))
            how = dict(spec=AttentionSpec(1.0), window=0)
            made = jax.make_jaxpr(lambda q, s, how=how: attention(q, q, q, segments=s, **how))(
                q, rows
            )
            assert str(made).count("name=splash_mha_fwd") == kernels
