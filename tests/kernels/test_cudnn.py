"""Packed attention by cuDNN: its calls, and our use of them with a numpy emulation.

Tests of jaxrl/kernels/attention/cudnn.py. The calls themselves run only on GPUs:

    JAX_PLATFORMS=cuda,cpu pytest tests/kernels/test_cudnn.py -k on_a_gpu
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

from jaxrl.kernels.attention import attention, cudnn
from jaxrl.kernels.attention.cudnn import CudnnConfig, attention_cudnn
from jaxrl.kernels.attention_spec import AttentionSpec
from sharding import Rules

RULES = Rules()
B, T = 3, 40


def packings(n: int) -> list[np.ndarray]:
    """Rows of segments with gaps between some.

    The first rows are a full row, one without a segment and one of single tokens; the last rows are
    only padding.
    """
    rng = np.random.default_rng(0)
    numbers = [np.where(rng.random(T) < 0.7, np.arange(1, T + 1), 0) for _ in range(n * B)]
    rows = [np.repeat(row, rng.integers(1, rng.integers(3, 20), T))[:T] for row in numbers]
    rows[:3] = [np.full(T, 7), np.zeros(T), np.arange(1, T + 1)]
    rows[-B:] = [np.zeros(T)] * B
    return list(np.reshape(rows, (n, B, T)).astype(np.int32))


def pieces(q, k, places):
    """(slot, its indices in flat q, its indices in flat k) of every slot with a segment."""
    q_lens, k_lens, q_starts, k_starts = (x.reshape(-1) for x in places)
    assert np.all(np.diff((q_lens > 0).astype(int)) <= 0)  # empty slots come last
    assert np.all(np.diff(q_starts) >= 0) and q_starts[-1] == q.size and k_starts[-1] == k.size
    assert len(q_starts) == len(k_starts) == len(q_lens) + B  # as in JAX; cuDNN reads one more
    for slot in np.flatnonzero(q_lens):
        own = q_starts[slot] + np.arange(q_lens[slot] * q.shape[2] * q.shape[3])
        seen = k_starts[slot] + np.arange(k_lens[slot] * k.shape[2] * k.shape[3])
        yield slot, own, seen


def tokens(x, piece):
    """[L, heads, H]"""
    return x.reshape(-1)[piece].reshape(-1, *x.shape[2:])


def weights(config: CudnnConfig, q, k, norm=None):
    """(softmax [N, L, L] of one segment, its log-sums [N, L])."""
    L, G = len(q), q.shape[1] // k.shape[1]
    scores = np.einsum("TNH,SNH->NTS", q, np.repeat(k, G, 1)) * config.scale
    ago = np.arange(L)[:, None] - np.arange(L)
    scores = np.where((ago >= 0) & (ago < (config.window or L)), scores, -np.inf)
    norm = np.log(np.sum(np.exp(scores), axis=-1)) if norm is None else norm
    return np.exp(scores - norm[..., None]), norm


def twin_forward(config: CudnnConfig, q, k, v, places):
    out = np.full(q.shape, np.nan, q.dtype)
    norm = np.full((places[0].size, q.shape[2], T), np.nan, np.float32)
    for slot, own, seen in pieces(q, k, places):
        p, norms = weights(config, tokens(q, own), tokens(k, seen))
        G = q.shape[2] // k.shape[2]
        mixed = np.einsum("NTS,SNH->TNH", p, np.repeat(tokens(v, seen), G, 1))
        out.reshape(-1)[own], norm[slot, :, : norms.shape[1]] = mixed.reshape(-1), norms
    return out, norm


def twin_backward(config: CudnnConfig, q, k, v, norm, do, out, places):
    dq, dk, dv = (np.full(x.shape, np.nan, x.dtype) for x in (q, k, v))
    G = q.shape[2] // k.shape[2]
    for slot, own, seen in pieces(q, k, places):
        one_q, one_do, one_out = (tokens(x, own) for x in (q, do, out))
        one_k, one_v = (tokens(x, seen) for x in (k, v))
        p, _ = weights(config, one_q, one_k, norm[slot, :, : len(one_q)])
        dp = np.einsum("TNH,SNH->NTS", one_do, np.repeat(one_v, G, 1))
        ds = p * (dp - np.einsum("TNH,TNH->NT", one_do, one_out)[..., None]) * config.scale
        dq.reshape(-1)[own] = np.einsum("NTS,SNH->TNH", ds, np.repeat(one_k, G, 1)).reshape(-1)
        for to, by, x in ((dk, ds, one_q), (dv, p, one_do)):
            shared = np.einsum("NTS,TNH->SNH", by, x).reshape(len(x), -1, G, x.shape[-1])
            to.reshape(-1)[seen] = shared.sum(2).reshape(-1)
    return dq, dk, dv


@pytest.fixture
def twins(monkeypatch):
    """Emulates cuDNN's calls with numpy; each has slots for two segments per row."""

    def call(twin, config, like, *args):
        def in_numpy(*args):
            return twin(config, *jax.tree.map(np.asarray, args))

        return list(jax.pure_callback(in_numpy, like, *args))

    def forward(config, q, k, v, slots, *, with_norm=False):
        norm = jax.ShapeDtypeStruct((len(slots.starts), q.shape[2], T), jnp.float32)
        made = call(twin_forward, config, (q, norm), q, k, v, cudnn._offsets(q, k, slots))
        return made[: 1 + with_norm]

    def backward(config, q, k, v, norm, do, out, slots):
        places = cudnn._offsets(q, k, slots)
        return call(twin_backward, config, (q, k, v), q, k, v, norm, do, out, places)

    monkeypatch.setattr(cudnn, "forward_call", forward)
    monkeypatch.setattr(cudnn, "backward_call", backward)
    monkeypatch.setattr(cudnn, "SLOT_BYTES", 0)


def value_and_grads(attend, window: int, scale: float):
    """f(q, k, v, weight of every output, segments)"""

    def loss(q, k, v, weight, segments):
        spec = AttentionSpec(scale, rules=RULES)
        out = attend(q, k, v, spec=spec, segments=segments, window=window)
        return jnp.sum((out * weight).astype(jnp.float32)), out

    def run(*args):
        (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*args)
        return out, *grads

    return jax.jit(run)


def arrays(N, K, H, dtype=jnp.float32, shape=(B, T)):
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (*shape, n, H), dtype)
        for key, n in zip(keys, (N, K, K, N), strict=True)
    ]


@pytest.mark.parametrize(
    ("heads", "window"), [((4, 2, 8), 0), pytest.param((2, 2, 8), 5, marks=pytest.mark.thorough)]
)
def test_values_and_gradients_equal_the_reference(one_device, twins, heads, window):
    """Padding included: the emulation leaves NaN there and in tokens without a slot."""

    def ours(q, k, v, *, spec, segments, window):
        return cudnn._local_attention(CudnnConfig(spec.scale, window), q, k, v, segments)

    reference = functools.partial(attention, implementation="reference")
    want, got = (value_and_grads(f, window, 0.3) for f in (reference, ours))
    for segments in packings(8):
        given = (*arrays(*heads), jnp.asarray(segments))
        for a, b in zip(want(*given), got(*given), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_device_may_have_more_segments_than_a_call(one_device, twins):
    """Three rows of 40 one-token segments, two per row and call: 120 segments in 20 calls of 6."""
    q = jnp.zeros((B, T, 1, 8))
    segments = jnp.tile(jnp.arange(1, T + 1), (B, 1))
    number, n = cudnn._number_segments(segments)
    assert n == 120 and cudnn.slots_per_row(q.shape, q.shape) == 2
    np.testing.assert_array_equal(number.reshape(-1), np.arange(120))
    (slots,) = cudnn._call_in_turn(lambda slots: [slots.of_token], q, q, segments, [segments])
    np.testing.assert_array_equal(slots.reshape(-1), np.arange(120) % 6)


def test_a_call_has_as_many_slots_as_fit():
    # 8,192 tokens, 12 heads of 128, 2 kv heads: 4 x 128 bytes for dq, 4 for a sum, and 2 x 128
    # each for dk and dv.
    q, k = (1, 8192, 12, 128), (1, 8192, 2, 128)
    assert cudnn.slot_bytes(q, k) == 8192 * 12 * 1028  # 96.4 MiB
    assert cudnn.slot_bytes(q, q) == 8192 * 12 * 516
    assert cudnn.slots_per_row(q, k) == 5  # in 512 MiB
    assert cudnn.slots_per_row((2, *q[1:]), (2, *k[1:])) == 2
    assert cudnn.slots_per_row((1, 65536, 12, 128), (1, 65536, 2, 128)) == 2
    assert cudnn.slots_per_row((1, 32, 2, 64), (1, 32, 2, 64)) == 32  # a token each


def custom_calls(lowered) -> list[tuple[str, dict, str]]:
    """(target, backend_config, layouts and types) of cuDNN's calls in a lowered program."""
    found = []
    for line in lowered.as_text().splitlines():
        if match := re.search(r'@(__cudnn\S+)\(.*backend_config = "(.*?)", (.*)', line):
            types = re.sub(r"tensor<\d+xui8>", "workspace", match[3])
            found.append((match[1], json.loads(match[2].replace(r"\22", '"')), types))
    return found


@pytest.mark.parametrize(("heads", "window"), [((4, 2, 64), 0), ((3, 3, 128), 100)])
def test_the_calls_are_those_that_jax_makes_of_packed_rows(monkeypatch, heads, window):
    """Except for the workspace size, which XLA replaces."""
    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(private, "check_compute_capability", lambda least: True)
    monkeypatch.setattr(cudnn, "slots_per_row", lambda q, k: 5)
    N, K, H = heads
    q, k = (jax.ShapeDtypeStruct((2, 256, n, H), jnp.bfloat16) for n in (N, K))
    segments, lengths, starts = (jax.ShapeDtypeStruct((2, n), jnp.int32) for n in (256, 5, 6))
    config = CudnnConfig(0.125, window)

    def theirs(q, k, v, lengths, starts):
        return private.dot_product_attention(
            q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=starts, kv_offsets=starts,
            scale=config.scale, mask_type=private.MaskType.PADDING_CAUSAL,
            sliding_window_length=config.window or None,
        )  # fmt: skip

    def ours(q, k, v, segments):
        return cudnn._local_attention(config, q, k, v, segments)

    def calls(attend, *args):
        def loss(*args):
            return jnp.sum(attend(*args).astype(jnp.float32))

        return [
            call
            for f in (attend, jax.grad(loss, (0, 1, 2)))
            for call in custom_calls(jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)))
        ]

    want, got = calls(theirs, q, k, k, lengths, starts), calls(ours, q, k, k, segments)
    names = [name.removeprefix("__cudnn$fmha") for name, *_ in want]
    assert names == ["Softmax", "Softmax", "SoftmaxBackward"]  # alone, and with its gradient
    assert want == got[::2] == got[1::2]  # the first call, and those in the loop


@pytest.mark.parametrize(
    ("dtype", "H", "options", "reason"),
    [
        (jnp.float32, 64, dict(), r"float32 \(set config.model.dtype to 'bfloat16'\)"),
        (jnp.bfloat16, 36, dict(), "heads of width 36, no multiple of 8 up to 256"),
        (jnp.bfloat16, 264, dict(), "heads of width 264, no multiple"),
        (jnp.bfloat16, 64, dict(softcap=50.0), r"soft caps \(50\)"),
        (jnp.bfloat16, 64, dict(window=jnp.int32(8)), "set config.model.layers to 'list'"),
    ],
)
def test_unsupported_inputs_are_errors_that_name_the_remedy(
    one_device, monkeypatch, dtype, H, options, reason
):
    monkeypatch.setattr(cudnn, "check_platform", lambda *_: None)
    q = jax.ShapeDtypeStruct((1, 64, 2, H), dtype)
    spec = AttentionSpec(1.0, options.get("softcap"))
    config = dict(spec=spec, window=options.get("window", 0))
    with pytest.raises(NotImplementedError, match=f"attention='cudnn' does not support .*{reason}"):
        jax.eval_shape(
            lambda q, s: attention_cudnn(q, q, q, segments=s, **config), q, segments_of(q)
        )


def test_more_than_2_to_the_31_query_elements_are_rejected(one_device, monkeypatch):
    monkeypatch.setattr(cudnn, "check_platform", lambda *_: None)
    q = jax.ShapeDtypeStruct((4, 2**16, 64, 128), jnp.bfloat16)  # 2^31 numbers
    attend = functools.partial(attention_cudnn, spec=AttentionSpec(1.0), window=0)
    with pytest.raises(
        NotImplementedError, match=r"2147483648 query elements .*lower config.learner.token"
    ):
        jax.eval_shape(lambda q, s: attend(q, q, q, segments=s), q, segments_of(q))


def test_cudnn_runs_only_on_gpus(one_device):
    q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    spec = AttentionSpec(1.0)
    attend = functools.partial(attention, implementation="cudnn", spec=spec, window=0)
    with pytest.raises(NotImplementedError, match="runs on gpu and these devices are cpu"):
        jax.eval_shape(lambda q, s: attend(q, q, q, segments=s), q, segments_of(q))


def segments_of(q):
    return jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)


@pytest.mark.skipif(
    "cuda" not in (jax.config.jax_platforms or ""), reason="JAX_PLATFORMS has no cuda"
)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("heads", [(4, 4, 64), (12, 2, 128)])
@pytest.mark.parametrize("slot_bytes", [0, cudnn.SLOT_BYTES])
def test_on_a_gpu_it_equals_the_reference(one_device, monkeypatch, heads, window, slot_bytes):
    """Rows with gaps, without a segment, and with single tokens; in one call or several."""
    monkeypatch.setattr(cudnn, "SLOT_BYTES", slot_bytes)
    segments = np.zeros((3, 1024), np.int32)
    segments[0], segments[1, :1] = 1, 1
    for number, start in enumerate(range(0, 1024, 128)):
        segments[2, start : start + 128 - 17 * number] = number + 1
    given = (*arrays(*heads, dtype=jnp.bfloat16, shape=segments.shape), jnp.asarray(segments))
    want, got = (
        value_and_grads(functools.partial(attention, implementation=name), window, 0.1)(*given)
        for name in ("reference", "cudnn")
    )
    for a, b in zip(want, got, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)  # both are rounded to bfloat16
        assert not np.any(b[segments == 0])
