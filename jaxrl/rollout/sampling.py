"""Sampling next tokens on device, every row by its own parameters, without sorting the vocabulary.

A token costs one uniform number, drawn from (seed, prompt id, sample id, position) alone: it does
not depend on what else is in the batch. B rows, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Key, UInt

from jaxrl import types
from jaxrl.kernels.logprob import token_logp

BLOCK = 256  # of the vocabulary: one level finds the block, the other the token in it


@struct.dataclass
class SamplingParams:
    """config.SamplingConfig of every row, as arrays."""

    temperature: types.Array  # float32 [B], 0 = greedy
    top_k: types.Array  # int32 [B], 0 = off
    top_p: types.Array  # float32 [B], 1 = off
    min_p: types.Array  # float32 [B], 0 = off


def row_keys(
    seed: UInt[Array, "B"], prompt_id: UInt[Array, "B"], sample: UInt[Array, "B"]
) -> Key[Array, "B"]:
    """The random key of each sequence."""

    def key(seed, prompt_id, sample):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), prompt_id), sample)

    return jax.vmap(key)(seed, prompt_id, sample)


def uniforms(keys: Key[Array, "B"], positions: Int[Array, "B"]) -> Float[Array, "B"]:
    """One number in [0, 1) for the token at each position."""
    return jax.vmap(lambda key, p: jax.random.uniform(jax.random.fold_in(key, p)))(keys, positions)


def sample(
    logits: Float[Array, "B V"], uniform: Float[Array, "B"], params: SamplingParams
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Next tokens and their logprobs.

    Filters apply in this order to softmax(logits / temperature): top-k, top-p of what is left
    (https://arxiv.org/abs/1904.09751), min-p (https://arxiv.org/abs/2407.01082). Tokens that tie at
    the border stay.

    The logprob is that of the *unfiltered* softmax(logits / temperature), at temperature 1 for greedy
    rows: the number that the trainer computes for the same token, so that the gap between the two is
    the numerical one and the first ratio of a PPO update is 1. A filter samples from this
    distribution cut down to its kept tokens, which adds one constant per position to the logprob.
    """
    greedy = params.temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, params.temperature)[:, None]
    top = jnp.max(scaled, axis=-1)
    weights = jnp.exp(scaled - top[:, None])
    filtered = ~greedy & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    weights = jax.lax.cond(jnp.any(filtered), lambda: _filter(weights, params), lambda: weights)
    best = _argmax(scaled)
    drawn = _inverse_cdf(weights, uniform)
    # Rounding in the sums could point between two tokens at one of weight zero.
    possible = jnp.take_along_axis(weights, drawn[:, None], axis=1)[:, 0] > 0
    token = jnp.where(greedy | ~possible, best, drawn)
    return token, token_logp(scaled, token)


def _inverse_cdf(weights: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """The token at which the running sum of the weights passes uniform * total."""
    blocks = _in_blocks(weights, fill=0.0)
    sums = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    target = uniform[:, None] * sums[:, -1:]
    block = jnp.minimum(jnp.sum(sums <= target, axis=-1), sums.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(sums, block[:, None] - 1, axis=1)[:, 0], 0.0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    rest = target - before[:, None]
    offset = jnp.minimum(jnp.sum(jnp.cumsum(inside, axis=-1) <= rest, axis=-1), BLOCK - 1)
    return (block * BLOCK + offset).astype(jnp.int32)


def _argmax(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """The first of the largest, in two levels: argmax over a long row is slow on CPU."""
    blocks = _in_blocks(logits, fill=-jnp.inf)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def _in_blocks(x: Float[Array, "B V"], fill: float) -> Float[Array, "B n_blocks block"]:
    B, V = x.shape
    x = jnp.pad(x, ((0, 0), (0, -V % BLOCK)), constant_values=fill)
    return x.reshape(B, -1, BLOCK)


def _filter(weights: Float[Array, "B V"], params: SamplingParams) -> Float[Array, "B V"]:
    """Zeroes the weights (1 at the most likely token) that top-k, top-p and min-p leave out."""
    V = weights.shape[1]
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, V), V)

    def at_least_k(border):
        return jnp.sum(weights >= border[:, None], axis=-1) >= k

    weights = _from(_largest_border(at_least_k, weights.shape[0]), weights)
    mass = params.top_p * jnp.sum(weights, axis=-1)

    def enough_mass(border):
        return jnp.sum(_from(border, weights), axis=-1) >= mass

    border = _largest_border(enough_mass, weights.shape[0])
    border = jnp.where(params.top_p < 1, border, 0.0)
    return _from(jnp.maximum(border, params.min_p), weights)


def _from(border: Float[Array, "B"], weights: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """The weights of each row that reach its border, the others zero."""
    return jnp.where(weights >= border[:, None], weights, 0.0)


def _largest_border(holds: Callable[[jax.Array], jax.Array], n_rows: int) -> Float[Array, "B"]:
    """The largest float32 b in [0, 1] of each row for which holds(b); it does at 0, and once it
    does not, it does not beyond. Floats >= 0 order as their bits do, so 30 halvings find b exactly.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        ok = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    past_one = int(np.float32(1.0).view(np.int32)) + 1
    bounds = jnp.zeros(n_rows, jnp.int32), jnp.full(n_rows, past_one, jnp.int32)
    low, _ = jax.lax.fori_loop(0, 30, halve, bounds)
    return jax.lax.bitcast_convert_type(low, jnp.float32)
