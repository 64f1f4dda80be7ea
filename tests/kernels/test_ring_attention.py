"""Ring and Ulysses attention over sharded rows against the reference on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.attention import attention
from jaxrl.kernels.attention.online_softmax import combine
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.ring_attention import ring_attention
from jaxrl.kernels.ring_attention.splash import ring_splash
from jaxrl.kernels.ring_attention.triton import ring_triton
from sharding import RING, TRAIN, ULYSSES, Rules, make_mesh, mesh_order, row_order

# Segments of a row of 512 tokens. Over 4 devices a chunk is 64 tokens.
LENGTHS = [
    [300, 150],  # crosses all device boundaries; padding at the end
    [10, 64, 100, 1, 330],
]
T = 512


def problem(N, K, H, *, dtype=jnp.float32, lengths=LENGTHS, T=T):
    """q, k, v and a weight for every output, and segments, on the host."""
    segments = np.zeros((len(lengths), T), np.int32)
    for row, row_lengths in zip(segments, lengths, strict=True):
        ends = np.cumsum(row_lengths)
        for number, (end, length) in enumerate(zip(ends, row_lengths, strict=True), 1):
            row[end - length : end] = number
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(len(lengths), T, heads, H) for heads in (N, K, K, N)]
    arrays = [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]
    return [np.asarray(a) for a in arrays], segments


def value_and_grad(
    attend, rules: Rules, mesh: dict, arrays, segments, *, window=0, softcap=None, sinks=None
):
    """Output and gradients of its weighted sum, in the original token order; then of the sinks."""
    spec = AttentionSpec(arrays[0].shape[-1] ** -0.5, softcap, rules)

    def loss(q, k, v, sinks, weight, segments):
        out = attend(q, k, v, spec=spec, segments=segments, window=window, sinks=sinks)
        return jnp.sum((out * weight).astype(jnp.float32)), out

    with jax.set_mesh(make_mesh(**mesh)):
        names = ("heads", "kv_heads", "kv_heads", "heads")
        specs = [rules.spec("batch", "time", name, None) for name in names]
        inputs = [
            jax.device_put(in_order(mesh_order, a, rules), spec)
            for a, spec in zip(
                (*arrays, segments), (*specs, rules.spec("batch", "time")), strict=True
            )
        ]
        grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
        (_, out), (*grads, d_sinks) = grad(*inputs[:3], sinks, *inputs[3:])
        rows = [in_order(row_order, np.asarray(x), rules) for x in (out, *grads)]
        return rows if sinks is None else [*rows, np.asarray(d_sinks)]


def in_order(order, array, rules):
    """Applies mesh_order or row_order, which take [B, T]."""
    flat = array.reshape(*array.shape[:2], -1)
    return np.stack([order(flat[..., i], rules) for i in range(flat.shape[-1])], -1).reshape(
        array.shape
    )


def assert_close(got, want, tol=1e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol)


reference = functools.partial(attention, implementation="reference")
one = functools.partial(value_and_grad, reference, TRAIN, {})
OPTIONS = dict(window=jnp.int32(200), softcap=5.0, sinks=np.linspace(-2, 3, 4, dtype=np.float32))


@pytest.fixture(scope="module")
def alone():
    """Arrays, segments, and the results of one device."""
    arrays, segments = problem(4, 2, 16)
    return arrays, segments, one(arrays, segments, **OPTIONS)


BOTH = dataclasses.replace(RING, ulysses=2)  # places of two devices, which share the heads
triton = functools.partial(ring_triton, interpret=True)
splash = functools.partial(ring_splash, interpret=True)
QUICK = [
    (ring_attention, RING, dict(fsdp=2, sequence=2, tensor=2)),
    (attention, ULYSSES, dict(fsdp=2, sequence=2, tensor=2)),
    pytest.param(ring_attention, RING, dict(sequence=4), marks=pytest.mark.thorough),
    pytest.param(triton, BOTH, dict(sequence=4), marks=pytest.mark.thorough),
    pytest.param(
        functools.partial(triton, block=128), RING, dict(sequence=2), marks=pytest.mark.thorough
    ),
    pytest.param(splash, RING, dict(sequence=2), marks=pytest.mark.thorough),
]
MORE = [
    (ring_attention, RING, dict()),
    (ring_attention, RING, dict(sequence=8)),  # chunks of 32 tokens, padded to blocks of 64
    (functools.partial(ring_attention, implementation="reference"), RING, dict(sequence=4)),
    (functools.partial(ring_attention, implementation="reference"), BOTH, dict(sequence=8)),
    (ring_attention, BOTH, dict(fsdp=2, sequence=4)),
    (triton, RING, dict(sequence=8)),  # chunks of 32 tokens, two in a block of 64
    (splash, BOTH, dict(sequence=8)),
    (attention, ULYSSES, dict(sequence=4)),
]


def name(value):
    """Part of a test's id, the same in every process."""
    if isinstance(value, Rules):
        return "ulysses" if value.ulysses > 1 else ""
    function = getattr(value, "func", value)
    return str(getattr(function, "__name__", function))


@pytest.mark.parametrize(("attend", "rules", "mesh"), QUICK, ids=name)
def test_sharded_rows_give_values_and_gradients_of_the_reference(attend, rules, mesh, alone):
    arrays, segments, want = alone
    assert_close(value_and_grad(attend, rules, mesh, arrays, segments, **OPTIONS), want)


@pytest.mark.slow
@pytest.mark.parametrize(("attend", "rules", "mesh"), MORE, ids=name)
def test_any_number_of_devices_gives_the_same_values_and_gradients(attend, rules, mesh, alone):
    arrays, segments, want = alone
    assert_close(value_and_grad(attend, rules, mesh, arrays, segments, **OPTIONS), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "options"),
    [((4, 2, 32), dict()), ((2, 2, 16), dict(softcap=2.0)), ((4, 1, 16), dict(window=100))],
)
def test_a_ring_supports_soft_caps_and_windows(heads, options):
    arrays, segments = problem(*heads)
    got = value_and_grad(ring_attention, RING, dict(sequence=4), arrays, segments, **options)
    assert_close(got, one(arrays, segments, **options))


@pytest.mark.slow
@pytest.mark.parametrize("attend", [triton, splash], ids=["triton", "splash"])
@pytest.mark.parametrize(
    ("heads", "options"),
    [((4, 2, 32), dict()), ((2, 2, 16), dict(softcap=2.0)), ((4, 1, 16), dict(window=100))],
)
def test_the_kernels_support_soft_caps_and_windows(attend, heads, options):
    arrays, segments = problem(*heads)
    got = value_and_grad(attend, RING, dict(sequence=2), arrays, segments, **options)
    assert_close(got, one(arrays, segments, **options))


@pytest.mark.slow
@pytest.mark.parametrize("attend", [triton, splash], ids=["triton", "splash"])
def test_the_kernels_in_bfloat16_combine_in_float32(attend):
    arrays, segments = problem(4, 2, 16, dtype=jnp.bfloat16)
    got = value_and_grad(attend, RING, dict(sequence=4), arrays, segments)
    want = one([a.astype(np.float32) for a in arrays], segments)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert_close([x.astype(np.float32) for x in got], want, tol=3e-2)  # rounding of four results
    for x in got:
        assert not np.any(x[segments == 0]) and np.any(x)  # padding


def test_two_means_combine_to_the_mean_over_all_keys():
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((3, 10)), rng.standard_normal((10, 4))

    def mean(of: slice):
        weights = np.exp(scores[:, of])
        total = weights.sum(-1)
        return jnp.float32(weights @ values[of] / total[:, None]), jnp.float32(np.log(total))

    for got, want in zip(
        combine(*mean(slice(0, 7)), *mean(slice(7, 10))), mean(slice(0, 10)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    # No visible key: the other mean stays.
    nothing = jnp.full((3, 4), 9.0), jnp.full(3, -1e30)
    for got, want in zip(combine(*nothing, *mean(slice(0, 7))), mean(slice(0, 7)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_every_device_has_the_same_number_of_visible_keys():
    """A row of 512 tokens is one segment, over 4 places or over 4 devices in 2 places."""
    n_keys = np.arange(1, T + 1)  # of each query, in the original order
    for rules in (RING, BOTH):
        with jax.set_mesh(make_mesh(sequence=4)):
            ordered = mesh_order(n_keys[None], rules)[0]
            places = ordered.reshape(rules.ring_size, -1)
        # After the exchange each device of a place has all its tokens and a part of the heads.
        assert len(set(places.sum(axis=1))) == 1
        assert places[0].tolist() != n_keys[: places.shape[1]].tolist()


@pytest.mark.thorough
def test_chunks_that_are_no_multiple_of_64_are_padded():
    arrays, segments = problem(4, 2, 16, T=80, lengths=[[33, 40], [80]])
    got = value_and_grad(ring_attention, RING, dict(sequence=4), arrays, segments)  # chunks of 10
    assert_close(got, one(arrays, segments))


@pytest.mark.slow
def test_a_ring_in_bfloat16_computes_in_float32():
    arrays, segments = problem(4, 2, 16, dtype=jnp.bfloat16)
    got = value_and_grad(ring_attention, RING, dict(sequence=4), arrays, segments)
    want = one([a.astype(np.float32) for a in arrays], segments)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert_close([x.astype(np.float32) for x in got], want, tol=2e-2)  # the results' rounding
    for x in got:
        assert not np.any(x[segments == 0]) and np.any(x)  # padding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "mesh"),
    [
        ((8, 2), dict(sequence=8)),  # four copies of each kv head
        ((6, 3), dict(sequence=2)),  # two copies of each, although one and a half would be enough
    ],
    ids=str,
)
def test_ulysses_copies_kv_heads_that_do_not_divide(heads, mesh):
    arrays, segments = problem(*heads, 16)
    got = value_and_grad(attention, ULYSSES, mesh, arrays, segments)
    assert_close(got, one(arrays, segments))


def test_ulysses_moves_heads_only_by_all_to_all():
    arrays, segments = problem(8, 2, 16)
    with jax.set_mesh(make_mesh(sequence=4, tensor=2)):
        spec = [ULYSSES.spec("batch", "time", h, None) for h in ("heads", "kv_heads", "kv_heads")]
        q, k, v = (jax.device_put(a, s) for a, s in zip(arrays, spec, strict=False))
        rows = jax.device_put(segments, ULYSSES.spec("batch", "time"))
        attend = functools.partial(attention, spec=AttentionSpec(0.2, rules=ULYSSES), window=0)
        text = jax.jit(attend).lower(q, k, v, segments=rows).compile().as_text()
    gathered = [line for line in text.splitlines() if " all-gather(" in line]
    assert all("s32" in line for line in gathered), gathered  # the segments' numbers
    assert " all-to-all(" in text and " collective-permute(" not in text


def test_query_heads_that_do_not_divide_are_one_clear_error():
    arrays, segments = problem(6, 2, 16)
    with pytest.raises(ValueError, match=r"6 query heads cannot be shared by 4 devices.*'ring'"):
        value_and_grad(attention, ULYSSES, dict(sequence=4), arrays, segments)


def test_an_indivisible_row_is_one_clear_error():
    arrays, segments = problem(4, 2, 16, T=68, lengths=[[68]])
    with pytest.raises(ValueError, match=r"68 tokens.*4 devices; make its length a multiple of 8"):
        value_and_grad(ring_attention, RING, dict(sequence=4), arrays, segments)
