"""Online softmax over blocks of 64 keys: the arithmetic that training and decode share.

Queries visit the same key blocks in the same order with the same operations, whether keys come from
a packed row or from pages, so both give the same bits on CPU. That requires:
- `row_sum`, whose summation order is fixed;
- at least two query rows in a matrix product (XLA uses another algorithm for one row), and a value
  width that is a multiple of 64 (otherwise the algorithm depends on the number of rows);
- that a fully masked block changes nothing: the state is scaled by exp(0) = 1 and exp(MASKED - max)
  = 0 is added. Blocks before the first visible key leave finite numbers, which the first visible
  key multiplies by 0.

Flash attention, https://arxiv.org/abs/2205.14135, algorithm 1. M query rows, H head dim, W value
width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.bits import materialize, row_sum

BLOCK = 64  # keys
MASKED = -1e30  # not -inf: a fully masked row must stay finite


@struct.dataclass
class Softmax:
    """State of an online softmax-weighted mean."""

    max_score: Any  # float32 [*B, M], largest score so far
    denominator: Any  # float32 [*B, M], Σ exp(score - max_score)
    numerator: Any  # float32 [*B, M, W], Σ exp(score - max_score) value


def init_softmax(shape: tuple[int, ...], width: int) -> Softmax:
    """The state before the first key block."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Softmax(jnp.full(shape, MASKED), zeros, jnp.zeros((*shape, width), jnp.float32))


def add_block(
    state: Softmax,
    q: Float[Array, "*B M H"],
    k: Float[Array, "*B S H"],
    v: Float[Array, "*B S W"],
    visible: Bool[Array, "*#B M S"],
    spec: AttentionSpec,
) -> Softmax:
    """The state after one more block of keys."""
    scores = block_scores(q, k, spec)
    scores = materialize(jnp.where(visible, scores, MASKED))
    max_score = jnp.maximum(state.max_score, jnp.max(scores, axis=-1))
    weights = materialize(jnp.exp(scores - max_score[..., None]))
    correction = jnp.exp(state.max_score - max_score)
    return Softmax(
        max_score=max_score,
        denominator=materialize(state.denominator * correction) + row_sum(weights),
        numerator=materialize(state.numerator * correction[..., None]) + matmul(weights, v),
    )


def normalize(state: Softmax) -> tuple[jax.Array, jax.Array]:
    """(mean [*B, M, W], log Σ exp(score) [*B, M]); zeros and MASKED without visible keys."""
    visible = state.max_score > MASKED
    denominator = jnp.where(visible, state.denominator, 1.0)
    mean = jnp.where(visible[..., None], state.numerator, 0.0) / denominator[..., None]
    return mean, jnp.where(visible, state.max_score + jnp.log(denominator), MASKED)


def combine(
    out: Float[Array, "*A H"],
    norm: Float[Array, "*A"],
    more: Float[Array, "*A H"],
    more_norm: Float[Array, "*A"],
) -> tuple[jax.Array, jax.Array]:
    """The mean over two sets of keys, float32, and the log of its softmax denominator."""
    total = jnp.logaddexp(norm, more_norm)
    weight, more_weight = jnp.exp(norm - total), jnp.exp(more_norm - total)
    return out * weight[..., None] + more.astype(jnp.float32) * more_weight[..., None], total


def block_scores(q, k, spec: AttentionSpec):
    """cap(q kᵀ * scale), [*B, M, S]."""
    return spec.scores(matmul(q, k, transpose_b=True))


def matmul(a, b, *, transpose_a: bool = False, transpose_b: bool = False):
    """Matrix product over the last two axes of both, in float32."""
    n = a.ndim - 2
    batch = tuple(range(n))
    contract = ((n if transpose_a else n + 1,), (n + 1 if transpose_b else n,))
    dims = (contract, (batch, batch))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def pad_axis(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """`x` padded with zeros at the end of `axis` to the next multiple of `multiple`."""
    missing = -x.shape[axis] % multiple
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths) if missing else x
