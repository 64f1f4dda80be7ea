"""Attention without causal mask within segments, against all scores in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.attention.online_softmax import MASKED
from jaxrl.kernels.attention.segments import attention_in_segments
from jaxrl.kernels.attention_spec import AttentionSpec
from sharding import TRAIN

N, H = 2, 8


def reference(q, k, v, segments):
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) * H**-0.5
    same = (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, None]
    probs = jax.nn.softmax(jnp.where(same[:, None], scores, MASKED), axis=-1)
    out = jnp.einsum("BNTS,BSNH->BTNH", probs, v)
    return jnp.where(segments[..., None, None] > 0, out, 0.0)


def rows(*rows: list[tuple[int, int]]) -> np.ndarray:
    """Rows of (segment, length)."""
    return np.array([[s for s, n in row for _ in range(n)] for row in rows], np.int32)


@pytest.mark.parametrize(
    "segments",
    [
        rows([(1, 5), (2, 3), (0, 4)], [(1, 12)]),
        # segments over several blocks of keys and queries, and one that ends with the row
        pytest.param(
            rows([(1, 150), (2, 1), (3, 49)], [(1, 70), (2, 60), (0, 70)]),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_values_and_gradients_are_those_of_all_scores(segments, one_device):
    rng = np.random.default_rng(0)
    q, k, v, w = rng.normal(size=(4, *segments.shape, N, H)).astype(np.float32)
    spec = AttentionSpec(H**-0.5, None, TRAIN)

    def blocks(q, k, v):
        return attention_in_segments(q, k, v, spec=spec, segments=jnp.asarray(segments))

    def run(attend):
        def loss(*args):
            out = attend(*args)
            return jnp.sum(out * w), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    grads, out = run(blocks)
    expected_grads, expected = run(lambda q, k, v: reference(q, k, v, segments))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_query_sees_later_keys_of_its_segment_only(one_device):
    """Equal scores: every output is the mean of its segment's values, 0 at padding."""
    segments = jnp.asarray(rows([(1, 2), (2, 3), (0, 1)]))
    v = np.arange(6.0, dtype=np.float32).reshape(1, 6, 1, 1)
    zeros = jnp.zeros((1, 6, 1, 1))
    spec = AttentionSpec(1.0, None, TRAIN)
    attend = functools.partial(attention_in_segments, spec=spec, segments=segments)
    out = jax.jit(attend)(zeros, zeros, v)
    # (0 + 1) / 2 and (2 + 3 + 4) / 3
    np.testing.assert_allclose(np.asarray(out)[0, :, 0, 0], [0.5, 0.5, 3, 3, 3, 0], atol=1e-6)
