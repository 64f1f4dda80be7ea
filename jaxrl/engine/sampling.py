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
from jaxrl.kernels.bits import materialize
from jaxrl.kernels.logprob import token_logp
from sharding import target_platform

BLOCKS = 256, 128  # of the vocabulary: one level finds the block, the other the token in it


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
    scaled = materialize(logits / jnp.where(greedy, 1.0, params.temperature)[:, None])
    blocks = _in_blocks(scaled)
    largest = jnp.max(blocks, axis=-1)
    top = materialize(jnp.max(largest, axis=-1))
    written = None
    if target_platform() == "cpu":
        # Alone in its fusion: XLA on CPU has two exponentials, and a border is the weight of a token.
        written = materialize(jnp.exp(blocks - top[:, None, None]))

    def weights():
        """On CPU read by all; elsewhere formed by each fusion that reads the logits, without room in memory."""
        return jnp.exp(blocks - top[:, None, None]) if written is None else written

    filtered = ~greedy & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    least = jax.lax.cond(
        jnp.any(filtered),
        lambda: least_weight(weights(), params, logits.shape[1]),
        lambda: jnp.zeros_like(top),
    )
    drawn, weight = _inverse_cdf(_from(least, weights()), uniform)
    # Rounding in the sums could point between two tokens at one of weight zero.
    token = jnp.where(greedy | (weight == 0), _argmax(blocks, largest), drawn)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    in_row = weights().reshape(logits.shape[0], -1)
    if written is not None:  # padding adds nothing, but its sum has another order on CPU
        in_row = in_row[:, : logits.shape[1]]
    return token, token_logp(chosen, top, in_row)


def _inverse_cdf(
    weights: Float[Array, "B n block"], uniform: Float[Array, "B"]
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """The token at which the running sum of the weights passes uniform * total, and its weight."""
    sums = jnp.cumsum(jnp.sum(weights, axis=-1), axis=-1)
    target = uniform[:, None] * sums[:, -1:]
    block = jnp.minimum(jnp.sum(sums <= target, axis=-1), sums.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(sums, block[:, None] - 1, axis=1)[:, 0], 0.0)
    inside, size = _of_block(weights, block), weights.shape[2]
    rest = target - before[:, None]
    offset = jnp.minimum(jnp.sum(jnp.cumsum(inside, axis=-1) <= rest, axis=-1), size - 1)
    weight = jnp.take_along_axis(inside, offset[:, None], axis=1)[:, 0]
    return (block * size + offset).astype(jnp.int32), weight


def _argmax(blocks: Float[Array, "B n block"], largest: Float[Array, "B n"]) -> Int[Array, "B"]:
    """The first of the largest: argmax over a long row is slow on CPU."""
    block = jnp.argmax(largest, axis=-1)
    offset = jnp.argmax(_of_block(blocks, block), axis=-1)
    return (block * blocks.shape[2] + offset).astype(jnp.int32)


def _of_block(blocks: Float[Array, "B n block"], block: Int[Array, "B"]) -> Float[Array, "B block"]:
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _in_blocks(logits: Float[Array, "B V"]) -> Float[Array, "B n block"]:
    """All that follows reads this: a TPU lays it out anew, and padding would be a copy more."""
    B, V = logits.shape
    size = next((size for size in BLOCKS if V % size == 0), BLOCKS[0])
    padded = jnp.pad(logits, ((0, 0), (0, -V % size)), constant_values=-jnp.inf)
    return padded.reshape(B, -1, size)


def least_weight(
    weights: Float[Array, "B n block"], params: SamplingParams, V: int
) -> Float[Array, "B"]:
    """Of the weights (1 at the most likely token, 0 in padding) the least that top-k, top-p and min-p leave."""
    B = weights.shape[0]
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, V), V)

    def at_least_k(border):
        return jnp.sum(weights >= border[:, None, None], axis=(1, 2)) >= k

    first = _largest_border(at_least_k, B)
    kept = _from(first, weights)
    mass = params.top_p * jnp.sum(kept, axis=(1, 2))

    def enough_mass(border):
        return jnp.sum(_from(border, kept), axis=(1, 2)) >= mass

    second = jnp.where(params.top_p < 1, _largest_border(enough_mass, B), 0.0)
    return jnp.maximum(jnp.maximum(first, second), params.min_p)


def _from(
    border: Float[Array, "B"], weights: Float[Array, "B n block"]
) -> Float[Array, "B n block"]:
    """The weights of each row that reach its border, the others zero."""
    return jnp.where(weights >= border[:, None, None], weights, 0.0)


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
