"""The GPU kernels compile for Hopper chips that are not attached."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl.kernels.attention import attention
from jaxrl.kernels.attention.cudnn import SLOT_BYTES, slot_bytes, slots_per_row
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.grouped_matmul import grouped_matmul
from jaxrl.kernels.paged_attention import paged_attention
from jaxrl.kernels.quantized import Quantized
from jaxrl.kernels.ring_attention import ring_attention
from jaxrl.planner.compiled.cost import program_cost
from jaxrl.planner.compiled.kernels import cudnn_work, grouped_work, paged_work
from jaxrl.planner.topology import topology
from sharding import DECODE, RING, TRAIN, make_mesh
from tests.kernels.abstract_arrays import abstract
from tests.kernels.compiled_attention import check_compiled_gradients

pytest.importorskip("jax_cuda13_plugin", reason="the CUDA compiler is not installed")


@pytest.mark.parametrize(
    ("heads", "page_len", "T", "dtype", "options"),
    [
        ((28, 4, 128), 128, 1, jnp.bfloat16, dict()),
        ((9, 3, 64), 64, 1, jnp.bfloat16, dict()),
        ((8, 4, 256), 64, 64, jnp.bfloat16, dict(softcap=50.0)),  # Gemma 2, prefill
        ((12, 2, 128), 64, 1, jnp.int8, dict()),
        ((8, 2, 128), 64, 64, jnp.float8_e4m3fn, dict()),
        ((16, 1, 576), 128, 1, jnp.bfloat16, dict(latent=True)),  # DeepSeek-V3, tensor 8
        ((128, 1, 576), 128, 16, jnp.bfloat16, dict(latent=True)),
        ((8, 4, 512), 64, 16, jnp.bfloat16, dict()),  # Gemma 4, layers without a window
        pytest.param(  # gpt-oss
            (64, 8, 64), 64, 1, jnp.bfloat16, dict(sinks=True), marks=pytest.mark.thorough
        ),
    ],
)
def test_paged_attention_compiles(heads, page_len, T, dtype, options):
    N, K, H = heads
    B, C = 64, 4096 // page_len
    spec = AttentionSpec(0.1, options.get("softcap"), DECODE)
    mesh = make_mesh(topology("h100:8").devices, fsdp=8)
    with jax.set_mesh(mesh):
        q = abstract(mesh, (B, T, N, H), jnp.bfloat16, DECODE.spec(None, None, "heads"))
        heads = DECODE.spec(None, "kv_heads")
        pool = abstract(mesh, (2048, K, page_len, H), dtype, heads)
        if dtype.dtype.itemsize == 1:
            pool = Quantized(pool, abstract(mesh, pool.shape[:3], jnp.float32, heads))
        table, places = (jax.ShapeDtypeStruct((B, n), jnp.int32) for n in (C, T))

        sinks = None
        if options.get("sinks"):
            sinks = abstract(mesh, (N,), jnp.bfloat16, DECODE.spec("heads"))

        values = None if options.get("latent") else pool

        def attend(q, k_pages, v_pages, table, places, window, sinks):
            where = dict(page_table=table, positions=places, window=window, sinks=sinks)
            return paged_attention(q, k_pages, v_pages, spec=spec, **where)

        window = jax.ShapeDtypeStruct((), jnp.int32)
        compiled = jax.jit(attend).lower(q, pool, values, table, places, window, sinks).compile()
    text, keys = compiled.as_text(), 700.0
    blind = program_cost(text)
    cost = program_cost(text, kernels=functools.partial(paged_work, keys=keys))
    queries = T * N // K  # per kv head
    # Rows of up to 64 queries, 32 of wide heads; all heads of a token are in one.
    most = max(64 if H <= 256 else 32, N // K)
    rows = B * -(-queries // most)
    keys += page_len / 2  # the last page is read whole
    assert cost.total_flops == 2 * 2 * rows * min(queries, most) * K * keys * H
    token = H + 4 if isinstance(pool, Quantized) else 2 * H  # bytes of a head
    n_pools = 1 if options.get("latent") else 2  # of keys and values
    pool, pages = (n_pools * K * n * token for n in (2048 * page_len, rows * keys))
    assert blind.bytes_accessed - pool == cost.bytes_accessed - pages > 0


@pytest.mark.parametrize(
    ("sizes", "heads", "block", "options"),
    [
        (dict(fsdp=2, tensor=4), (28, 4, 128), 128, dict()),
        (dict(fsdp=8), (9, 3, 64), 128, dict()),
        (dict(fsdp=8), (8, 4, 256), 64, dict(softcap=50.0)),  # Gemma 2
        pytest.param(  # gpt-oss
            dict(fsdp=4, tensor=2), (64, 8, 64), 128, dict(sinks=True), marks=pytest.mark.thorough
        ),
    ],
)
def test_training_attention_compiles(sizes, heads, block, options):
    mesh, shape = make_mesh(topology("h100:8").devices, **sizes), (2 * sizes["fsdp"], 4096)
    check_compiled_gradients(
        attention, mesh, rules=TRAIN, shape=shape, heads=heads, block=block, **options
    )


@pytest.mark.parametrize(
    ("ulysses", "heads", "block"), [(1, (28, 4, 128), 128), (2, (8, 4, 256), 64)]
)
def test_ring_attention_compiles(ulysses, heads, block):
    check_compiled_gradients(
        ring_attention,
        make_mesh(topology("h100:8").devices, fsdp=2, sequence=4),
        rules=dataclasses.replace(RING, ulysses=ulysses),
        shape=(2, 16384),
        heads=heads,
        block=block,
        places=4 // ulysses,
    )


@pytest.mark.parametrize(
    ("sizes", "heads", "window"),
    [(dict(fsdp=2, tensor=4), (28, 4, 128), 0), (dict(fsdp=8), (9, 3, 64), 1024)],
)
def test_training_attention_of_cudnn_compiles(sizes, heads, window):
    """Compiles only the calls; cuDNN and its support checks are not involved."""
    N, K, H = heads
    B, T = 2 * sizes["fsdp"], 4096
    mesh = make_mesh(topology("h100:8").devices, **sizes)
    with jax.set_mesh(mesh):
        q = abstract(mesh, (B, T, N, H), jnp.bfloat16, TRAIN.spec("batch", None, "heads"))
        k = abstract(mesh, (B, T, K, H), jnp.bfloat16, TRAIN.spec("batch", None, "kv_heads"))
        rows = abstract(mesh, (B, T), jnp.int32, TRAIN.spec("batch"))

        def loss(q, k, v, segments):
            how = dict(implementation="cudnn", spec=AttentionSpec(H**-0.5), window=window)
            out = attention(q, k, v, segments=segments, **how)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, rows).compile()
    text = compiled.as_text()
    n = sizes.get("tensor", 1)
    q, k = (2, T, N // n, H), (2, T, K // n, H)  # of a device
    M = slots_per_row(q, k)
    calls = re.findall(
        r'target="__cudnn\$fmha(\w+)", operand_layout_constraints={(.*?)}, api', text
    )
    assert [name for name, _ in calls].count("Softmax") == 2  # the first call and those of the loop
    assert [name for name, _ in calls].count("SoftmaxBackward") == 2
    for _, operands in calls:  # rows in place; lengths and offsets of queries and of keys
        shapes = ("bf16[{},{},{},{}]".format(*q), f"s32[2,{M}]", f"s32[2,{M + 1}]")
        assert [operands.count(shape) for shape in shapes[1:]] == [2, 2] and shapes[0] in operands
    assert f"{T},{T}]" not in text
    cost = program_cost(text, lambda loop: 0.0, functools.partial(cudnn_work, keys=T / 2))
    assert cost.total_flops == (2 + 5) * 2 * B * N * T * T / 2 * H / mesh.size
    workspace = 2 * M * slot_bytes(q, k)
    kept = compiled.memory_analysis().temp_size_in_bytes - workspace
    assert workspace <= SLOT_BYTES and 0 < kept < 4 * B * N * T * T / mesh.size / 8  # of the scores


def test_a_grouped_product_of_one_layer_copies_no_matrix():
    L, E, M, D, F = 4, 128, 2048, 2048, 768
    with jax.set_mesh(make_mesh(topology("h100:1").devices)):
        x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((M, D), (L, E, F, D)))
        sizes, layer = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((E,), ()))
        multiply = jax.jit(lambda x, w, sizes, layer: grouped_matmul(x, w, sizes, layer=layer))
        compiled = multiply.lower(x, w, sizes, layer).compile()
    cost = program_cost(compiled.as_text(), kernels=grouped_work)
    assert cost.total_flops == 2 * M * D * F
    assert cost.bytes_accessed == pytest.approx(2 * (E * F * D + M * (D + F)), rel=1e-3)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**16


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [
        ((65536, 2048, 768, 128), (jnp.bfloat16, jnp.bfloat16)),  # Qwen3-30B-A3B, training
        ((2048, 2048, 768, 128), (jnp.bfloat16, jnp.bfloat16)),  # decode
        ((4096, 4096, 1792, 8), (jnp.float32, jnp.float32)),  # Mixtral with tensor 8
        ((2048, 2048, 768, 128), (jnp.bfloat16, jnp.int8)),
    ],
)
def test_grouped_products_compile(shape, dtypes):
    M, D, F, E = shape
    mesh = make_mesh(topology("h100:1").devices)
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((M, D), dtypes[0])
        w = jax.ShapeDtypeStruct((E, F, D), dtypes[1])
        sizes = jax.ShapeDtypeStruct((E,), jnp.int32)
        trained = (0,) if dtypes[1] == jnp.int8 else (0, 1)

        def loss(x, w, sizes):
            return jnp.sum(grouped_matmul(x, w, sizes).astype(jnp.float32) ** 2)

        compiled = jax.jit(jax.grad(loss, trained)).lower(x, w, sizes).compile()
    text = compiled.as_text()
    cost = program_cost(text, kernels=grouped_work)
    assert cost.total_flops == (1 + len(trained)) * 2 * M * D * F
    assert "while(" not in text
    # No copy of the matrices: at most the products and their gradients, in two dtypes.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * M * (D + F) * x.dtype.itemsize
