"""Next-token sampling on device, with parameters per row and without sorting the vocabulary.

A token uses one uniform number, a function of (seed, prompt id, sample id, position) only, so it
does not depend on the rest of the batch. B rows, V vocabulary.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, UInt, UInt32

from jaxrl import types
from jaxrl.kernels.bits import materialize, row_sum
from jaxrl.kernels.logprob import token_logp
from sharding import Rules, target_platform

BLOCKS = 256, 128  # vocabulary block sizes: one level finds the block, the other the token in it


@struct.dataclass
class Sample:
    """The next token of every row, with its logprobs."""

    token: types.Array  # int32 [B]
    logp: types.Array  # float32 [B], of softmax(logits / temperature), without filters
    behavior_logp: types.Array  # float32 [B], of the distribution that the token was sampled from
    support: types.Array = None  # uint32 [B, W], bits of the kept tokens; no bits without a filter
    # int32 [B, 2 * n], ids of the most likely tokens and the bits of their logprobs
    top: types.Array = None

    def columns(self) -> Int[Array, "3 B"]:
        """The token and the bits of its two logprobs."""
        bits = jax.lax.bitcast_convert_type(jnp.stack([self.logp, self.behavior_logp]), jnp.int32)
        return jnp.concatenate([self.token[None], bits])


N_COLUMNS = 3  # int32 columns of a sampled token in the output of a dispatch


@struct.dataclass
class SamplingParams:
    """The SamplingConfig of every row, as arrays."""

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
    logits: Float[Array, "B V"],
    uniform: Float[Array, "B"],
    params: SamplingParams,
    *,
    keep_support: bool = False,
) -> Sample:
    """Next tokens and their logprobs.

    Filters apply to softmax(logits / temperature) in this order: top-k, top-p of the remaining mass
    (https://arxiv.org/abs/1904.09751), min-p (https://arxiv.org/abs/2407.01082). Tokens that tie at
    the cutoff are kept.

    `logp` is of softmax(logits / temperature), which the trainer computes for the token too, so
    that the gap between the two is purely numerical. `behavior_logp` is of the same distribution
    restricted to the kept tokens: logp - log Z with their probability Z. It equals `logp` bit by
    bit in rows without a filter. Both have temperature 1 in greedy rows. `keep_support` returns the
    kept tokens.
    """
    greedy = params.temperature <= 0
    scaled = materialize(logits / jnp.where(greedy, 1.0, params.temperature)[:, None])
    blocks = _in_blocks(scaled)
    largest = jnp.max(blocks, axis=-1)
    top = materialize(jnp.max(largest, axis=-1))
    shared = None
    if target_platform() == "cpu":
        # In its own fusion: XLA on CPU has two exponentials, and a cutoff is the weight of a token.
        shared = materialize(jnp.exp(blocks - top[:, None, None]))

    def weights():
        """On CPU one shared array; elsewhere fused into each reader, without memory for it."""
        return jnp.exp(blocks - top[:, None, None]) if shared is None else shared

    filtered = ~greedy & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))

    def find_cutoff():
        cutoff = cutoff_weight(weights(), params, logits.shape[1])
        return cutoff, jnp.where(filtered, _log_kept_mass(cutoff, weights()), 0.0)

    cutoff, log_mass = jax.lax.cond(
        jnp.any(filtered), find_cutoff, lambda: (jnp.zeros_like(top), jnp.zeros_like(top))
    )
    drawn, weight = _inverse_cdf(_keep_from(cutoff, weights()), uniform)
    # Rounding in the sums could select a token of weight zero between two others.
    token = jnp.where(greedy | (weight == 0), _argmax(blocks, largest), drawn)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    in_row = weights().reshape(logits.shape[0], -1)
    if shared is not None:  # padding adds 0, but changes the summation order on CPU
        in_row = in_row[:, : logits.shape[1]]
    logp = token_logp(chosen, top, in_row)
    support = None
    if keep_support:
        kept = filtered[:, None] & (weights() >= cutoff[:, None, None]).reshape(len(top), -1)
        support = _pack_bits(kept[:, : logits.shape[1]])
    return Sample(token, logp, logp - log_mass, support)


def _log_kept_mass(
    cutoff: Float[Array, "B"], weights: Float[Array, "B n block"]
) -> Float[Array, "B"]:
    """log Z, Z being the share of the weights from the row's cutoff upwards; 0 if all are kept."""
    in_rows = len(cutoff), -1
    kept = row_sum(_keep_from(cutoff, weights).reshape(in_rows))
    return jnp.log(kept) - jnp.log(row_sum(weights.reshape(in_rows)))


def _pack_bits(bits: Bool[Array, "B V"]) -> UInt32[Array, "B W"]:
    """Bit i of word w is element 32 w + i (data/support.py)."""
    padded = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % 32)))
    words = padded.reshape(len(bits), -1, 32).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _inverse_cdf(
    weights: Float[Array, "B n block"], uniform: Float[Array, "B"]
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """The token at which the cumulative weight exceeds uniform * total, and its weight."""
    sums = jnp.cumsum(jnp.sum(weights, axis=-1), axis=-1)
    target = uniform[:, None] * sums[:, -1:]
    block = jnp.minimum(jnp.sum(sums <= target, axis=-1), sums.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(sums, block[:, None] - 1, axis=1)[:, 0], 0.0)
    inside, size = _take_block(weights, block), weights.shape[2]
    rest = target - before[:, None]
    offset = jnp.minimum(jnp.sum(jnp.cumsum(inside, axis=-1) <= rest, axis=-1), size - 1)
    weight = jnp.take_along_axis(inside, offset[:, None], axis=1)[:, 0]
    return (block * size + offset).astype(jnp.int32), weight


def _argmax(blocks: Float[Array, "B n block"], largest: Float[Array, "B n"]) -> Int[Array, "B"]:
    """The first maximum, in two levels: argmax over a long row is slow on CPU."""
    block = jnp.argmax(largest, axis=-1)
    offset = jnp.argmax(_take_block(blocks, block), axis=-1)
    return (block * blocks.shape[2] + offset).astype(jnp.int32)


def _take_block(
    blocks: Float[Array, "B n block"], block: Int[Array, "B"]
) -> Float[Array, "B block"]:
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _in_blocks(logits: Float[Array, "B V"]) -> Float[Array, "B n block"]:
    """Logits in blocks of the vocabulary.

    Every later step reads them in this shape: a TPU changes the layout once here. The block size
    divides V if possible, since padding costs another copy.
    """
    B, V = logits.shape
    size = next((size for size in BLOCKS if V % size == 0), BLOCKS[0])
    padded = jnp.pad(logits, ((0, 0), (0, -V % size)), constant_values=-jnp.inf)
    return padded.reshape(B, -1, size)


def cutoff_weight(
    weights: Float[Array, "B n block"], params: SamplingParams, V: int
) -> Float[Array, "B"]:
    """The smallest weight that top-k, top-p and min-p keep.

    Weights are relative to the most likely token, which has 1; padding has 0.
    """
    B = weights.shape[0]
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, V), V)

    def at_least_k(cutoff):
        return jnp.sum(weights >= cutoff[:, None, None], axis=(1, 2)) >= k

    first = _largest_cutoff(at_least_k, B)
    kept = _keep_from(first, weights)
    mass = params.top_p * jnp.sum(kept, axis=(1, 2))

    def enough_mass(cutoff):
        return jnp.sum(_keep_from(cutoff, kept), axis=(1, 2)) >= mass

    second = jnp.where(params.top_p < 1, _largest_cutoff(enough_mass, B), 0.0)
    return jnp.maximum(jnp.maximum(first, second), params.min_p)


def _keep_from(
    cutoff: Float[Array, "B"], weights: Float[Array, "B n block"]
) -> Float[Array, "B n block"]:
    """The weights with those below their row's cutoff set to 0."""
    return jnp.where(weights >= cutoff[:, None, None], weights, 0.0)


def _largest_cutoff(holds: Callable[[jax.Array], jax.Array], n_rows: int) -> Float[Array, "B"]:
    """The largest float32 c in [0, 1] of each row for which holds(c).

    The condition holds at 0, and once false it stays false for larger values. Floats >= 0 have the
    order of their bit patterns, so 30 bisections find c exactly.
    """

    def bisect(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        ok = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    past_one = int(np.float32(1.0).view(np.int32)) + 1
    bounds = jnp.zeros(n_rows, jnp.int32), jnp.full(n_rows, past_one, jnp.int32)
    low, _ = jax.lax.fori_loop(0, 30, bisect, bounds)
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def sample_sharded(
    logits: Float[Array, "B V"],
    uniform: Float[Array, "B"],
    params: SamplingParams,
    *,
    rules: Rules,
    keep_support: bool = False,
) -> Sample:
    """`sample` with the rows sharded over the devices that hold shards of the vocabulary."""
    sample_rows = functools.partial(sample, keep_support=keep_support)
    return map_rows(sample_rows, rules, n_rows=uniform.shape[0])(logits, uniform, params)


def map_rows(
    function: Callable[..., Sample], rules: Rules, *, n_rows: int
) -> Callable[..., Sample]:
    """`function` of trees [B, ...], with the rows sharded over the shards of the vocabulary.

    The devices exchange vocabulary shards for whole rows, which moves less data than an all-gather
    of all logits.
    """
    axes = rules.mesh_axes("vocab")
    if n_rows % rules.n_shards("vocab"):
        axes = ()  # not divisible: every device samples all rows
    by_row = jax.P(axes or None)
    shard_rows = functools.partial(jax.reshard, out_shardings=by_row)
    local = jax.shard_map(function, in_specs=by_row, out_specs=by_row, check_vma=False)

    def run(*inputs: types.Tree) -> Sample:
        sampled = local(*(jax.tree.map(shard_rows, rows) for rows in inputs))
        return jax.tree.map(lambda a: jax.reshard(a, jax.P()), sampled)

    return run
