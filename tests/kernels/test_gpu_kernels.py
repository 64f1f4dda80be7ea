"""The kernels of GPUs compile for Hopper chips that are not attached."""

import jax
import jax.numpy as jnp
import pytest
from abstract_arrays import abstract

from jaxrl.kernels.paged_attention import paged_attention
from jaxrl.planner.topology import topology
from sharding import DECODE, make_mesh

pytest.importorskip("jax_cuda13_plugin", reason="the CUDA compiler is not installed")


@pytest.mark.parametrize(
    ("heads", "page_len", "T", "options"),
    [
        ((28, 4, 128), 128, 1, dict()),
        ((9, 3, 64), 64, 1, dict()),
        ((8, 4, 256), 64, 64, dict(softcap=50.0)),  # Gemma 2, prefill
    ],
)
def test_paged_attention_compiles(heads, page_len, T, options):
    N, K, H = heads
    B, C = 64, 4096 // page_len
    mesh = make_mesh(topology("h100:8").devices, fsdp=8)
    with jax.set_mesh(mesh):
        q = abstract(mesh, (B, T, N, H), jnp.bfloat16, DECODE.spec(None, None, "heads"))
        pool = abstract(mesh, (2048, K, page_len, H), jnp.bfloat16, DECODE.spec(None, "kv_heads"))
        table, places = (jax.ShapeDtypeStruct((B, n), jnp.int32) for n in (C, T))

        def attend(q, k_pages, v_pages, table, places, window):
            how = dict(page_table=table, positions=places, window=window, softcap=None)
            return paged_attention(q, k_pages, v_pages, scale=0.1, rules=DECODE, **how | options)

        window = jax.ShapeDtypeStruct((), jnp.int32)
        compiled = jax.jit(attend).lower(q, pool, pool, table, places, window).compile()
    assert "paged_attention_triton" in compiled.as_text()
