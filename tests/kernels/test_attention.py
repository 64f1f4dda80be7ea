"""Packed attention against the [T, T] reference.

Tests of jaxrl/kernels/attention/, attention_spec.py, shard_attention.py and choice.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.attention import IMPLEMENTATIONS, attention
from jaxrl.kernels.attention.blockwise import attention_blockwise
from jaxrl.kernels.attention.limits import own_block
from jaxrl.kernels.attention.splash import _block_schedule, attention_splash
from jaxrl.kernels.attention.triton import attention_triton, heads_together
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.key_ranges import seen_by_ranges
from jaxrl.kernels.visibility import separate_segments
from sharding import Rules, make_mesh

RULES = Rules()
# Segment lengths of each row; segments start on multiples of 64.
LENGTHS = [[70, 64, 30], [200], [1, 129]]


def problem(N, K, H, *, T=220, lengths=LENGTHS, dtype=jnp.float32):
    """q, k, v, an output weight, and segments with padding between and after them."""
    B = len(lengths)
    segments = np.zeros((B, T), np.int32)
    for row, row_lengths in zip(segments, lengths, strict=True):
        start = 0
        for number, length in enumerate(row_lengths, 1):
            row[start : start + length] = number
            start += length + -length % 64
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(B, T, heads, H) for heads in (N, K, K, N)]
    arrays = [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]
    return arrays, jnp.asarray(segments)


def value_and_grad(
    attend, arrays, segments, *, window=0, softcap=None, sinks=False, visibility=None
):
    """Output and the gradients of its weighted sum into q, k, v, and into sinks if there are any.

    These are of both signs, from -2 to 3.
    """
    *qkv, weight = arrays
    spec = AttentionSpec(arrays[0].shape[-1] ** -0.5, softcap, RULES)
    inputs = [*qkv, jnp.linspace(-2.0, 3.0, qkv[0].shape[2])] if sinks else qkv

    def loss(q, k, v, sinks=None):
        out = attend(
            q, k, v, spec=spec, segments=segments, window=window, sinks=sinks, visibility=visibility
        )
        return jnp.sum((out * weight).astype(jnp.float32)), out

    grad = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(inputs))), has_aux=True))
    (_, out), grads = grad(*inputs)
    return jax.device_get((out, *grads))


def assert_close(want, got, tol=1e-5):
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol)


reference = functools.partial(attention, implementation="reference")
blockwise = functools.partial(attention, implementation="blockwise")
splash = functools.partial(attention_splash, interpret=True)
triton = functools.partial(attention_triton, interpret=True)


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((4, 1, 32), dict(window=jnp.int32(70), softcap=5.0)),
        pytest.param((9, 3, 64), dict(), marks=pytest.mark.thorough),
        # one query head per kv head, and a padded width
        pytest.param((4, 4, 16), dict(softcap=2.0), marks=pytest.mark.thorough),
        ((8, 2, 32), dict(window=40, sinks=True)),
    ],
)
def test_values_and_gradients_equal_the_reference(one_device, heads, options):
    arrays, segments = problem(*heads)
    want, got = (value_and_grad(f, arrays, segments, **options) for f in (reference, blockwise))
    assert_close(want, got)


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((4, 1, 128), dict(window=jnp.int32(70))),
        pytest.param((6, 2, 64), dict(), marks=pytest.mark.thorough),
        pytest.param((4, 4, 32), dict(window=40, softcap=2.0), marks=pytest.mark.thorough),
        ((4, 2, 64), dict(window=jnp.int32(90), sinks=True)),
    ],
)
def test_splash_equals_the_reference(one_device, heads, options):
    """Rows of several blocks of 128, some of which segments and windows exclude."""
    arrays, segments = problem(*heads, T=600, lengths=[[70, 64, 230, 100], [400, 100]])
    want, got = (value_and_grad(f, arrays, segments, **options) for f in (reference, splash))
    assert_close(want, got)


@pytest.mark.parametrize(
    ("heads", "block", "together", "options"),
    [
        ((4, 1, 16), 128, 2, dict(window=jnp.int32(70), softcap=2.0)),
        pytest.param((6, 2, 32), 128, 1, dict(), marks=pytest.mark.thorough),
        ((4, 1, 16), 64, 4, dict(window=40, sinks=True)),
    ],
)
def test_triton_equals_the_reference(one_device, monkeypatch, heads, block, together, options):
    """Programs of the gradients of keys sum over so many of the heads that share them."""
    monkeypatch.setattr("jaxrl.kernels.attention.triton.heads_together", lambda *_: together)
    arrays, segments = problem(*heads)
    attend = functools.partial(triton, block=block)
    want, got = (value_and_grad(f, arrays, segments, **options) for f in (reference, attend))
    assert_close(want, got)


@pytest.mark.parametrize(
    ("heads", "blocks", "together"),
    [
        ((12, 2), 64, 1),  # 8,192 tokens: 128 programs with all 6 heads, 768 with one
        ((12, 2), 128, 1),  # 256 and, with one head, 1,536
        ((12, 2), 256, 3),  # 32,768 tokens: 512 and, with 3 heads, 1,024
        ((28, 4), 64, 1),  # 256 and 1,792; 7 has no other divisor
        ((28, 4), 256, 7),  # 32,768 tokens: 1,024
        ((32, 8), 64, 2),  # 8,192 tokens: 512 and 1,024
        ((32, 8), 128, 4),  # 1,024
        ((4, 4), 1, 1),
    ],
)
def test_heads_are_together_if_triton_has_programs_enough(heads, blocks, together):
    N, K = heads
    assert heads_together(N // K, blocks * K) == together


@pytest.mark.parametrize(
    ("chip", "H", "dtype", "T", "block"),
    [
        ("NVIDIA H100 80GB HBM3", 128, jnp.bfloat16, 4096, 128),
        ("NVIDIA B200", 64, jnp.bfloat16, 4096, 128),
        ("NVIDIA H100 80GB HBM3", 128, jnp.bfloat16, 4096 + 64, 64),
        ("NVIDIA H100 80GB HBM3", 256, jnp.bfloat16, 4096, 64),
        ("NVIDIA H100 80GB HBM3", 128, jnp.float32, 4096, 64),
        ("NVIDIA A100-SXM4-80GB", 128, jnp.bfloat16, 4096, 64),
    ],
)
def test_programs_of_triton_have_blocks_of_128_tokens_since_hopper(
    monkeypatch, chip, H, dtype, T, block
):
    monkeypatch.setattr("jaxrl.kernels.attention.limits.target_device_kind", lambda: chip)
    assert own_block(jnp.zeros((1, T, 1, H), dtype), T) == block


def test_splash_visits_only_visible_blocks():
    # Blocks 0 and 1 are one segment, block 2's segment starts in block 1, block 3 is separate.
    first, last = jnp.repeat(jnp.array([0, 0, 128, 384]), 128), jnp.arange(512)
    seen = seen_by_ranges(first, last, block=128, n_keys=512)
    np.testing.assert_array_equal(seen, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]])
    keys, queries = _block_schedule(seen[None])
    # After its last block, a row of queries prefetches the next row's first block.
    np.testing.assert_array_equal(keys, [[0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 2, 3], [3, 3, 3, 3]])
    np.testing.assert_array_equal(queries, [[0, 1, 2, 3], [1, 1, 2, 3], [0, 2, 2, 3], [0, 1, 2, 3]])


def test_splash_prefetches_what_it_visits_next_also_across_gaps():
    # Two branches (blocks 1 and 2) of a prefix (block 0); no query sees a key of block 3.
    seen = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]], bool)
    keys, queries = _block_schedule(seen[None])
    np.testing.assert_array_equal(keys, [[0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 2, 3], [3, 3, 3, 3]])
    np.testing.assert_array_equal(queries, [[0, 1, 2, 3], [1, 1, 2, 3], [2, 1, 2, 3], [0, 1, 2, 3]])


def test_splash_numbers_blocks_through_the_rows():
    seen = jnp.array([[[1, 0], [1, 1]], [[1, 0], [0, 1]]], bool)  # one segment; two segments
    keys, queries = _block_schedule(seen)
    np.testing.assert_array_equal(keys, [[0, 0], [0, 1], [2, 3], [3, 3]])
    np.testing.assert_array_equal(queries, [[0, 1, 2, 3], [1, 1, 2, 3]])


@pytest.mark.parametrize("run", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_splash_takes_as_many_rows_at_a_time_as_have_numbers(one_device, monkeypatch, run):
    arrays, segments = problem(2, 1, 32, T=128, lengths=[[70, 20], [100], [1, 60], [128]])
    attend = functools.partial(splash, spec=AttentionSpec(0.2), segments=segments, window=0)
    want = attend(*arrays[:3]) if run else None
    monkeypatch.setattr("jaxrl.kernels.attention.splash.MAX_LEN", 2 * 128)
    jaxpr = str(jax.make_jaxpr(attend)(*arrays[:3]))
    assert jaxpr.count("name=splash_mha_fwd") == 1 and "length=2" in jaxpr  # two groups of two
    if run:
        np.testing.assert_array_equal(attend(*arrays[:3]), want)


@pytest.mark.parametrize("query_block", [64, pytest.param(192, marks=pytest.mark.thorough)])
def test_query_blocks_change_no_bit_of_the_output(one_device, query_block):
    arrays, segments = problem(6, 2, 32)
    options = dict(spec=AttentionSpec(0.2), segments=segments, window=0)
    attend = functools.partial(attention_blockwise, **options)
    want = jax.jit(attend)(*arrays[:3])
    got = jax.jit(functools.partial(attend, query_block=query_block))(*arrays[:3])
    np.testing.assert_array_equal(want, got)


@pytest.mark.bitwise
def test_a_packed_segment_has_the_bits_of_a_separate_row(one_device):
    """After other segments of its row, which end on multiples of 64, and in a separate row."""
    arrays, segments = problem(6, 2, 32, lengths=[[70, 64, 28]])
    attend = jax.jit(functools.partial(attention, spec=AttentionSpec(0.2), window=0))
    q, k, v = arrays[:3]
    packed = attend(q, k, v, segments=segments)
    for start, length in ((0, 70), (128, 64), (192, 28)):
        own = [x[:, start : start + length] for x in (q, k, v)]
        alone = attend(*own, segments=jnp.ones((1, length), jnp.int32))
        np.testing.assert_array_equal(packed[:, start : start + length], alone)


def test_padding_gives_zeros_and_takes_no_gradient(one_device):
    arrays, segments = problem(4, 2, 32)
    for attend in (reference, blockwise):
        out, dq, dk, dv = value_and_grad(attend, arrays, segments)
        for x in (out, dq, dk, dv):
            assert not np.any(x[np.asarray(segments) == 0])


@pytest.mark.thorough
def test_bfloat16_is_computed_in_float32(one_device):
    arrays, segments = problem(6, 2, 32, dtype=jnp.bfloat16)
    want = value_and_grad(reference, [a.astype(jnp.float32) for a in arrays], segments)
    got = value_and_grad(blockwise, arrays, segments)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert_close(want, [x.astype(np.float32) for x in got], tol=2e-2)  # the rounding of the results


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", [dict(fsdp=2, tensor=4), pytest.param(dict(fsdp=8), marks=pytest.mark.thorough)]
)
def test_same_numbers_on_every_mesh(mesh):
    arrays, segments = problem(8, 4, 16, T=128, lengths=[[60, 30], [100]] * 4)
    results = []
    for sizes in ({}, mesh):
        with jax.set_mesh(make_mesh(**sizes)):
            spec = RULES.spec("batch", None, "heads", None)
            placed = [jax.reshard(a, spec) for a in arrays]
            rows = jax.reshard(segments, RULES.spec("batch", None))
            results.append(value_and_grad(blockwise, placed, rows, window=50))
    assert_close(*results)


def test_temporaries_grow_with_the_row_not_with_its_square(one_device):
    def temporaries(T):
        array = jax.ShapeDtypeStruct((1, T, 4, 64), jnp.float32)

        def loss(q, k, v):
            segments = jnp.ones((1, T), jnp.int32)
            out = blockwise(q, k, v, spec=AttentionSpec(0.1), segments=segments, window=0)
            return jnp.sum(out)

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(array, array, array).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 4096 * 4096 * 4  # less than one head's scores
    assert temporaries(4096) < 2.2 * temporaries(2048)


def test_splash_errors_name_the_platform_and_the_longest_row(one_device):
    arrays, segments = problem(4, 2, 32)
    named = functools.partial(attention, implementation="splash")
    with pytest.raises(NotImplementedError, match="runs on tpu and these devices are cpu"):
        value_and_grad(named, arrays, segments)
    q = jax.ShapeDtypeStruct((1, 2**16 + 1, 2, 32), jnp.float32)
    rows = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
    attend = functools.partial(splash, spec=AttentionSpec(1.0), window=0)
    with pytest.raises(NotImplementedError, match="up to 65536 tokens, this one has 65537"):
        jax.eval_shape(lambda q, s: attend(q, q, q, segments=s), q, rows)


@pytest.mark.parametrize(
    ("chip", "width", "dtype", "options", "kernel"),
    [
        ("NVIDIA H100 80GB HBM3", 128, jnp.bfloat16, dict(), "triton"),
        ("NVIDIA H100 80GB HBM3", 80, jnp.bfloat16, dict(), "cudnn"),
        ("NVIDIA B200", 96, jnp.bfloat16, dict(window=64), "cudnn"),
        ("NVIDIA H100 80GB HBM3", 80, jnp.bfloat16, dict(shared=True), "blockwise"),
        ("NVIDIA H100 80GB HBM3", 80, jnp.bfloat16, dict(softcap=5.0), "blockwise"),
        ("NVIDIA H100 80GB HBM3", 80, jnp.bfloat16, dict(window=jnp.int32(64)), "blockwise"),
        ("NVIDIA H100 80GB HBM3", 80, jnp.float32, dict(), "blockwise"),
        ("NVIDIA H100 80GB HBM3", 84, jnp.bfloat16, dict(), "blockwise"),
        ("NVIDIA A100-SXM4-80GB", 80, jnp.bfloat16, dict(), "blockwise"),
    ],
)
def test_auto_on_gpu_depends_on_the_shape(
    one_device, monkeypatch, chip, width, dtype, options, kernel
):
    chosen = []

    def record(name, q, *_, **__):
        chosen.append(name)
        return q

    for name in IMPLEMENTATIONS:
        monkeypatch.setitem(IMPLEMENTATIONS, name, functools.partial(record, name))
    monkeypatch.setattr("jaxrl.kernels.choice.target_platform", lambda: "gpu")
    monkeypatch.setattr("jaxrl.kernels.attention.limits.target_device_kind", lambda: chip)
    q, rows = jnp.zeros((1, 64, 2, width), dtype), jnp.ones((1, 64), jnp.int32)
    visibility = separate_segments(rows) if options.get("shared") else None
    how = dict(spec=AttentionSpec(1.0, options.get("softcap")), window=options.get("window", 0))
    attention(q, q, q, segments=rows, visibility=visibility, **how)
    assert chosen == [kernel]


def test_triton_names_the_width_that_it_does_not_support(one_device):
    arrays, segments = problem(4, 2, 80)
    with pytest.raises(NotImplementedError, match=r"heads of width 80, no power of two.*'auto'"):
        value_and_grad(triton, arrays, segments)


def test_an_unknown_name_lists_the_known_ones(one_device):
    arrays, segments = problem(4, 2, 32)
    with pytest.raises(ValueError, match="'flash' is not known; set one of auto, blockwise"):
        value_and_grad(functools.partial(attention, implementation="flash"), arrays, segments)


def test_auto_is_the_default(one_device):
    arrays, segments = problem(4, 2, 32)
    attend = [functools.partial(attention, implementation=name) for name in (None, "auto")]
    for a, b in zip(*(value_and_grad(f, arrays, segments) for f in attend), strict=True):
        np.testing.assert_array_equal(a, b)
