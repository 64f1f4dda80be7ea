"""The Triton kernels in bfloat16 against float32 references: on an NVIDIA GPU if there is one.

    JAX_PLATFORMS=cuda uv run --extra cuda pytest -n 0 -m gpu tests/kernels/test_on_gpu.py

Elsewhere they are emulated, with the tiles of a GPU that is not there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.attention.reference import attention_reference
from jaxrl.kernels.attention.triton import attention_triton
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.gated_delta.step import gated_delta_step_xla
from jaxrl.kernels.gated_delta.step_gpu import gated_delta_step_gpu
from jaxrl.kernels.grouped_matmul import grouped_matmul
from jaxrl.kernels.grouped_matmul.triton import grouped_matmul_triton
from jaxrl.kernels.paged_attention.reference import paged_attention_reference
from jaxrl.kernels.paged_attention.triton import paged_attention_triton
from jaxrl.kernels.quantized import dequantize, quantize
from jaxrl.kernels.visibility import separate_segments
from sharding import DECODE

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
EMULATED = jax.default_backend() != "gpu"
grouped = functools.partial(grouped_matmul_triton, interpret=EMULATED)
packed = functools.partial(attention_triton, interpret=EMULATED)


def assert_close(got, want, tol=2**-6):
    """Within a few roundings to bfloat16 of the largest number."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.any(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=tol * np.abs(b).max())


def group_sizes(M: int, E: int) -> jax.Array:
    """Sizes of random groups, some of them empty; 5 of `M` rows are in none."""
    rng = np.random.default_rng(0)
    share = rng.exponential(size=E) * (rng.random(E) < 0.8)
    ends = np.floor(np.cumsum(share) / share.sum() * (M - 5)).astype(np.int32)
    return jnp.asarray(np.diff(ends, prepend=0))


@pytest.mark.parametrize("M", [64, 512, 3000])  # tiles of 16, 64 and 128 rows
def test_grouped_products_and_their_gradients(M):
    E, D, F = 16, 320, 192
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (M, D), (E, F, D), (M, F)
    arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    sizes = group_sizes(M, E)

    def run(multiply, x, w, dy):
        y, pull = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
        return y, *pull(dy)

    reference = functools.partial(grouped_matmul, implementation="reference")
    wide = [a.astype(jnp.float32) for a in arrays]
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(run, reference))(*wide)
    assert_close(jax.jit(functools.partial(run, grouped))(*arrays), want)


def test_grouped_products_of_one_of_stacked_layers():
    L, E, M, D, F = 3, 8, 200, 256, 384
    keys = jax.random.split(jax.random.key(1), 2)
    x = jax.random.normal(keys[0], (M, D), jnp.bfloat16)
    stack = jnp.round(20 * jax.random.normal(keys[1], (L, E, F, D)))
    sizes = group_sizes(M, E)
    for w in (stack.astype(jnp.bfloat16), stack.clip(-127, 127).astype(jnp.int8)):
        got = jax.jit(grouped)(x, w, sizes, jnp.int32(1))
        with jax.default_matmul_precision("highest"):
            wide = w[1].astype(jnp.float32)
            want = grouped_matmul(x.astype(jnp.float32), wide, sizes, implementation="reference")
        assert_close(got, want)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("heads", "options"),
    [((8, 2, 128), dict()), ((6, 2, 64), dict(window=200)), ((4, 4, 128), dict(softcap=20.0))],
)
@pytest.mark.parametrize("block", [None, 128])
def test_attention_and_its_gradients(one_device, heads, options, shared, block):
    """Blocks as the GPU selects them, and of 128 tokens."""
    N, K, H = heads
    B, T = 2, 512
    segments = np.zeros((B, T), np.int32)
    segments[0, :300], segments[0, 320:500], segments[1, :512] = 1, 2, 1
    keys = jax.random.split(jax.random.key(2), 4)
    shapes = [(B, T, n, H) for n in (N, K, K, N)]
    arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    spec = AttentionSpec(H**-0.5, options.get("softcap"))
    visibility = separate_segments(jnp.asarray(segments)) if shared else None
    how = dict(spec=spec, segments=jnp.asarray(segments), window=options.get("window", 0))

    def run(attend, *arrays):
        def loss(q, k, v, weight):
            out = attend(q, k, v, visibility=visibility, **how)
            return jnp.sum(out.astype(jnp.float32) * weight), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)

    wide = [a.astype(jnp.float32) for a in arrays]
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(run, attention_reference))(*wide)
    got = jax.jit(functools.partial(run, functools.partial(packed, block=block)))(*arrays)
    assert_close(got, want)


@pytest.mark.parametrize("n_queries", [1, 64])  # decode, and a chunk of a prompt
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((12, 2, 128), dict()),
        ((8, 8, 64), dict(window=300, softcap=20.0)),
        ((16, 2, 64), dict(sinks=True)),
    ],
)
def test_paged_attention(one_device, heads, options, quantized, n_queries):
    N, K, H = heads
    B, page_len, n_columns = 5, 128, 9
    keys = jax.random.split(jax.random.key(3), 3)
    q = jax.random.normal(keys[0], (B, n_queries, N, H), jnp.bfloat16)
    shape = (B * n_columns + 3, K, page_len, H)
    pools = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:]]
    table = np.random.default_rng(0).permutation(B * n_columns).reshape(B, n_columns)
    last = np.array([n_columns * page_len - 1, 700, 64, 300, -1])[:, None]
    positions = np.maximum(last - np.arange(n_queries)[::-1], -1)  # -1 is padding
    how = dict(
        spec=AttentionSpec(H**-0.5, options.get("softcap"), DECODE),
        page_table=jnp.asarray(table, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        window=options.get("window", 0),
        sinks=jnp.linspace(-2.0, 3.0, N) if options.get("sinks") else None,
    )
    attend = functools.partial(paged_attention_triton, interpret=EMULATED, **how)
    if quantized:
        pools = [quantize(pool, n_shared=1, dtype=jnp.int8) for pool in pools]
    wide = [dequantize(pool) for pool in pools]
    got = jax.jit(attend)(q, *pools)
    with jax.default_matmul_precision("highest"):
        reference = functools.partial(paged_attention_reference, **how)
        want = jax.jit(reference)(q.astype(jnp.float32), *wide)
    assert_close(got, want)


@pytest.mark.parametrize("n_tokens", [1, 4])
def test_gated_delta_step(n_tokens):
    B, K, N, D, V = 4, 2, 4, 128, 128
    keys = jax.random.split(jax.random.key(4), 6)
    q, k = (jax.random.normal(key, (B, n_tokens, K, D)) / D**0.5 for key in keys[:2])
    v = jax.random.normal(keys[2], (B, n_tokens, N, V))
    g = -jax.random.uniform(keys[3], (B, n_tokens, N))
    beta = jax.random.uniform(keys[4], (B, n_tokens, N))
    states = jax.random.normal(keys[5], (B + 2, N, D, V))
    arrays = (q, k, v, g, beta, states, jnp.array([3, 1, 5, 0], jnp.int32))
    got = jax.jit(functools.partial(gated_delta_step_gpu, interpret=EMULATED))(*arrays)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(gated_delta_step_xla)(*arrays)
    assert_close(got, want, tol=1e-4)
