"""Next-token sampling on device, with parameters per row and without sorting the vocabulary.

A token uses one uniform number, a function of (seed, prompt id, sample id, position) only, so it
does not depend on the rest of the batch. B rows, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt, UInt32

from jaxrl import types
from jaxrl.kernels.attention.online_softmax import MASKED
from jaxrl.kernels.bits import materialize, row_sum
from jaxrl.kernels.logprob import token_logp
from sharding import Rules, target_platform

BLOCKS = 256, 128  # vocabulary block sizes: one level finds the block, the other the token in it
FILTERS = "top_k", "top_p", "min_p"
KEY_BITS = 28  # of a gap between 2^-24 and 256, in the search for the filters' cutoff
RADIX_BITS = {"cpu": 1}  # that one pass finds; 4 elsewhere


@struct.dataclass
class Sample:
    """The next token of every row, with its logprobs."""

    token: types.Array  # int32 [B]
    logp: types.Array  # float32 [B], of softmax(logits / temperature), without filters
    behavior_logp: types.Array  # float32 [B], of the distribution that the token was sampled from
    support: types.Array = (
        None  # uint32 [B, W], bits of the kept tokens; no bits in rows without a filter
    )
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
    # A filter is None if no row of the batch has it: then the program is without it.
    top_k: types.Array = None  # int32 [B], 0 = off
    top_p: types.Array = None  # float32 [B], 1 = off
    min_p: types.Array = None  # float32 [B], 0 = off

    @property
    def filtered(self) -> bool:
        """Whether the program has filters."""
        return any(column is not None for column in (self.top_k, self.top_p, self.min_p))

    def filters_rows(self) -> Bool[Array, "B"]:
        """The rows that have a filter."""
        off = jnp.zeros(self.temperature.shape, bool)
        top_k = off if self.top_k is None else self.top_k > 0
        top_p = off if self.top_p is None else self.top_p < 1
        min_p = off if self.min_p is None else self.min_p > 0
        return top_k | top_p | min_p


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
    never: int | None = None,
) -> Sample:
    """Next tokens and their logprobs.

    Filters apply to softmax(logits / temperature) in this order: top-k, top-p of the remaining mass
    (https://arxiv.org/abs/1904.09751), min-p (https://arxiv.org/abs/2407.01082). Tokens that tie at
    the cutoff are kept.

    `logp` is of softmax(logits / temperature), which the trainer computes for the token too, so
    that the gap between the two is purely numerical. `behavior_logp` is of the same distribution
    restricted to the kept tokens: logp - log Z with their probability Z. It equals `logp` bit by
    bit in rows without a filter. Both have temperature 1 in greedy rows. `keep_support` returns the
    kept tokens of programs with filters. The token `never` is not sampled; only `logp` counts it.
    """
    greedy = params.temperature <= 0
    temperature = jnp.where(greedy, 1.0, params.temperature)
    absent = None if never is None else logits[:, never] / temperature
    if never is not None:
        logits = logits.at[:, never].set(-jnp.inf)
    softmax = softmax_of_blocks(logits, temperature)
    sums, kept_of_block = softmax.sums, softmax.block_weights
    log_mass, support = jnp.zeros_like(softmax.top), None
    if params.filtered:
        filtered = ~greedy & params.filters_rows()
        gaps = lax.optimization_barrier(softmax.gaps())  # one array for all passes and comparisons
        cutoff = cutoff_gap(gaps, softmax, params, logits.shape[1])
        cutoff = jnp.where(filtered, cutoff, jnp.inf)
        kept = materialize(row_sum(_keep_to(cutoff, gaps, softmax.weights(gaps))))
        sums = jnp.where(filtered[:, None], kept, sums)
        log_mass = jnp.where(filtered, _log_sum(sums) - _log_sum(softmax.sums), 0.0)
        if keep_support:
            within = filtered[:, None, None] & (gaps <= cutoff[:, None, None])
            support = _pack_bits(within.reshape(len(logits), -1)[:, : logits.shape[1]])

        def kept_of_block(block: Int[Array, "B"]) -> Float[Array, "B size"]:
            return _keep_to(cutoff, _take_block(gaps, block), softmax.block_weights(block))

    drawn, weight = _inverse_cdf(sums, kept_of_block, uniform)
    # Rounding in the sums could select a token of weight zero between two others.
    token = jnp.where(greedy | (weight == 0), softmax.argmax, drawn)
    chosen = softmax.logit(token)
    logp = behavior_logp = token_logp(chosen, softmax.top, softmax.summands(logits.shape[1]))
    if absent is not None:
        logp -= jnp.log1p(jnp.exp(absent - softmax.top) / row_sum(softmax.sums))
    return Sample(token, logp, behavior_logp - log_mass, support)


def _log_sum(sums: Float[Array, "B n"]) -> Float[Array, "B"]:
    return materialize(jnp.log(materialize(row_sum(sums))))


@struct.dataclass
class BlockSoftmax:
    """softmax(l) of l = logits / temperature in n blocks of the vocabulary."""

    # float32 [B, n, block]; -inf is padding. On CPU already divided by the temperature, as the
    # quotient's bits depend on the fusion there.
    logits: types.Array
    temperature: types.Array  # float32 [B]
    top: types.Array  # float32 [B], the largest l
    argmax: types.Array  # int32 [B], the first token that has it
    sums: types.Array  # float32 [B, n], of the weights of each block
    # float32 [B, n, block], the weights on CPU: XLA there has two exponentials, and a token has one
    # weight. Elsewhere they are fused into their readers, without memory for them.
    stored: types.Array = None

    def gaps(self) -> Float[Array, "B n block"]:
        """top - l, in nats."""
        return self.top[:, None, None] - self.logits / self.temperature[:, None, None]

    def weights(self, gaps: Float[Array, "B n block"]) -> Float[Array, "B n block"]:
        """exp(l - top)."""
        return jnp.exp(-gaps) if self.stored is None else self.stored

    def block_weights(self, block: Int[Array, "B"]) -> Float[Array, "B block"]:
        """The weights of a block of each row."""
        if self.stored is not None:
            return _take_block(self.stored, block)
        scaled = _take_block(self.logits, block) / self.temperature[:, None]
        return jnp.exp(scaled - self.top[:, None])

    def logit(self, token: Int[Array, "B"]) -> Float[Array, "B"]:
        """l of a token of each row."""
        logits = self.logits.reshape(len(token), -1)
        return jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] / self.temperature

    def summands(self, V: int) -> Float[Array, "B s"]:
        """Numbers whose sum is that of the weights: on CPU, the V weights that the trainer adds."""
        if self.stored is None:
            return self.sums
        # Padding adds 0, but changes the summation order.
        return self.stored.reshape(len(self.top), -1)[:, :V]


def softmax_of_blocks(logits: Float[Array, "B V"], temperature: Float[Array, "B"]) -> BlockSoftmax:
    """The softmax, off the CPU from one pass over the logits."""
    if target_platform() == "cpu":
        scaled = _in_blocks(materialize(logits / temperature[:, None]))
        largest = jnp.max(scaled, axis=-1)
        top = materialize(jnp.max(largest, axis=-1))
        weights = materialize(jnp.exp(scaled - top[:, None, None]))
        sums, token = materialize(row_sum(weights)), _argmax(scaled, largest)
        return BlockSoftmax(scaled, jnp.ones_like(top), top, token, sums, weights)
    blocks = _in_blocks(logits)
    scaled = blocks / temperature[:, None, None]
    start = jnp.float32(MASKED), jnp.float32(0)
    largest, sums = lax.reduce((scaled, jnp.ones_like(scaled)), start, _join, (2,))
    top = jnp.max(largest, axis=-1)
    sums *= jnp.exp(largest - top[:, None])
    return BlockSoftmax(blocks, temperature, top, _argmax(blocks, largest), sums)


def _argmax(blocks: Float[Array, "B n block"], largest: Float[Array, "B n"]) -> Int[Array, "B"]:
    """The first maximum, in two levels: argmax over a long row is slow on CPU."""
    block = jnp.argmax(largest, axis=-1)
    offset = jnp.argmax(_take_block(blocks, block), axis=-1)
    return (block * blocks.shape[2] + offset).astype(jnp.int32)


def _join(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]):
    """(max l, sum exp(l - max l)) of two parts together (https://arxiv.org/abs/1805.02867)."""
    top = jnp.maximum(a[0], b[0])
    return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)


def _pack_bits(bits: Bool[Array, "B V"]) -> UInt32[Array, "B W"]:
    """Bit i of word w is element 32 w + i (data/support.py)."""
    padded = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % 32)))
    words = padded.reshape(len(bits), -1, 32).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _inverse_cdf(
    sums: Float[Array, "B n"],
    block_weights: Callable[[Int[Array, "B"]], Float[Array, "B block"]],
    uniform: Float[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """The token at which the cumulative weight exceeds uniform * total, and its weight.

    `sums` are those of the weights of each block, `block_weights` gives those of one block.
    """
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform[:, None] * ends[:, -1:]
    block = jnp.minimum(jnp.sum(ends <= target, axis=-1), ends.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(ends, block[:, None] - 1, axis=1)[:, 0], 0.0)
    inside, rest = block_weights(block), target - before[:, None]
    size = inside.shape[1]
    offset = jnp.minimum(jnp.sum(jnp.cumsum(inside, axis=-1) <= rest, axis=-1), size - 1)
    weight = jnp.take_along_axis(inside, offset[:, None], axis=1)[:, 0]
    return (block * size + offset).astype(jnp.int32), weight


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


def cutoff_gap(
    gaps: Float[Array, "B n block"], softmax: BlockSoftmax, params: SamplingParams, V: int
) -> Float[Array, "B"]:
    """The largest gap to the most likely token, in nats, that top-k, top-p and min-p keep."""
    cutoff, weights = jnp.full_like(softmax.top, jnp.inf), softmax.weights(gaps)
    mass = row_sum(softmax.sums)
    if params.top_k is not None:
        k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, V), V)
        found = _smallest_gap(gaps, jnp.ones_like(gaps, jnp.int32), k)
        cutoff = jnp.where(params.top_k > 0, found, cutoff)
        weights = _keep_to(cutoff, gaps, weights)
        mass = jnp.sum(weights, axis=(1, 2))
    if params.top_p is not None:
        found = _smallest_gap(gaps, weights, params.top_p * mass)
        cutoff = jnp.where(params.top_p < 1, jnp.minimum(found, cutoff), cutoff)
    if params.min_p is not None:
        cutoff = jnp.minimum(-jnp.log(params.min_p), cutoff)  # inf where min_p is 0
    return cutoff


def _keep_to(
    cutoff: Float[Array, "B"], gaps: Float[Array, "B *block"], weights: Float[Array, "B *block"]
) -> Float[Array, "B *block"]:
    """The weights, with those of gaps above their row's cutoff set to 0."""
    return jnp.where(gaps <= jnp.expand_dims(cutoff, range(1, gaps.ndim)), weights, 0.0)


def _smallest_gap(
    gaps: Float[Array, "B n block"], values: Shaped[Array, "B n block"], needed: Shaped[Array, "B"]
) -> Float[Array, "B"]:
    """The smallest c of each row for which the values of gaps up to c add up to `needed`.

    A radix search over the bits of c: floats >= 0 have the order of their bit patterns. A pass over
    the gaps finds the next `RADIX_BITS` of them. Gaps below 2^-24 count as 0, whose weights round
    to 1; if no gap below 256 suffices, c is infinite. Weights of gaps above 104 are 0.
    """
    bits = RADIX_BITS.get(target_platform(), 4)
    start = int(np.float32(2.0**-24).view(np.int32))

    def as_float(key: Int[Array, "B"]) -> Float[Array, "B"]:
        return lax.bitcast_convert_type(start + key, jnp.float32)

    def narrow(i: Int[Array, ""], low: Int[Array, "B"]) -> Int[Array, "B"]:
        """Adds the next digit: the number of tried keys below the one in search."""
        step = jnp.int32(1) << (KEY_BITS - bits * (i + 1))
        tried = [as_float(low + digit * step - 1) for digit in range(1, 2**bits)]
        totals = _sums_to(tried, gaps, values)
        return low + step * sum(jnp.where(total >= needed, 0, 1) for total in totals)

    low = lax.fori_loop(
        0,
        KEY_BITS // bits,
        narrow,
        jnp.zeros(needed.shape, jnp.int32),
        unroll=target_platform() == "gpu",  # a loop there ends a CUDA graph
    )
    return jnp.where(low < 2**KEY_BITS - 1, as_float(low), jnp.inf)


def _sums_to(
    limits: list[Float[Array, "B"]],
    gaps: Float[Array, "B n block"],
    values: Shaped[Array, "B n block"],
) -> Sequence[Shaped[Array, "B"]]:
    """The sums of the values of gaps up to each limit, in one pass over the gaps."""
    kept = tuple(jnp.where(gaps <= limit[:, None, None], values, 0) for limit in limits)
    zeros = (jnp.zeros((), values.dtype),) * len(kept)
    return lax.reduce(kept, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1, 2))


def sample_sharded(
    logits: Float[Array, "B V"],
    uniform: Float[Array, "B"],
    params: SamplingParams,
    *,
    rules: Rules,
    keep_support: bool = False,
    never: int | None = None,
) -> Sample:
    """`sample` with the rows sharded over the devices that hold shards of the vocabulary."""
    sample_rows = functools.partial(sample, keep_support=keep_support, never=never)
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
