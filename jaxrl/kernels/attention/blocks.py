"""Online softmax over blocks of 64 keys: the arithmetic that training and decode share.

A row of queries sees the same blocks in the same order by the same operations, whether its keys lie
in a packed row or in pages, so that both give the same bits on CPU. What that takes:
- `row_sum`, whose order of addition is fixed;
- at least two query rows in a product (one row is another algorithm), and a value width that is a
  multiple of 64 (else the algorithm depends on the number of rows);
- a block with nothing to see changes nothing: exp(0) = 1 scales what is there, exp(MASKED - max) = 0
  is added. Blocks before the first visible key leave finite numbers that the first visible key
  multiplies by 0.

Flash attention, https://arxiv.org/abs/2205.14135, algorithm 1. M query rows, H head dim, W value width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.bits import materialize, row_sum

BLOCK = 64  # keys
MASKED = -1e30  # not -inf: a row with every key masked must stay finite


@struct.dataclass
class Softmax:
    """A softmax-weighted mean under way."""

    top: Any  # float32 [*B, M], largest score so far
    total: Any  # float32 [*B, M], Σ exp(score - top)
    mixed: Any  # float32 [*B, M, W], Σ exp(score - top) value


def start(shape: tuple[int, ...], width: int) -> Softmax:
    zeros = jnp.zeros(shape, jnp.float32)
    return Softmax(jnp.full(shape, MASKED), zeros, jnp.zeros((*shape, width), jnp.float32))


def add_block(
    state: Softmax,
    q: Float[Array, "*B M H"],
    k: Float[Array, "*B S H"],
    v: Float[Array, "*B S W"],
    seen: Bool[Array, "*#B M S"],
    spec: AttentionSpec,
) -> Softmax:
    """Takes one block of keys into the mean."""
    scores = block_scores(q, k, spec)
    scores = materialize(jnp.where(seen, scores, MASKED))
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    weights = materialize(jnp.exp(scores - top[..., None]))
    keep = jnp.exp(state.top - top)
    return Softmax(
        top=top,
        total=materialize(state.total * keep) + row_sum(weights),
        mixed=materialize(state.mixed * keep[..., None]) + product(weights, v),
    )


def finish(state: Softmax) -> tuple[jax.Array, jax.Array]:
    """(mean [*B, M, W], log Σ exp(score) [*B, M]); zeros and MASKED where nothing was seen."""
    seen = state.top > MASKED
    total = jnp.where(seen, state.total, 1.0)
    mean = jnp.where(seen[..., None], state.mixed, 0.0) / total[..., None]
    return mean, jnp.where(seen, state.top + jnp.log(total), MASKED)


def block_scores(q, k, spec: AttentionSpec):
    """cap(q kᵀ * scale), [*B, M, S]."""
    return spec.scores(product(q, k, transpose_b=True))


def product(a, b, *, transpose_a: bool = False, transpose_b: bool = False):
    """Matrix product over the last two axes of both, in float32."""
    n = a.ndim - 2
    batch = tuple(range(n))
    contract = ((n if transpose_a else n + 1,), (n + 1 if transpose_b else n,))
    dims = (contract, (batch, batch))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def pad_axis(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Zeros behind `x` up to the next multiple."""
    missing = -x.shape[axis] % multiple
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths) if missing else x
