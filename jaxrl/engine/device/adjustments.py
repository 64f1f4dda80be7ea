"""Per-request changes of the logits on device: penalties, biases, min_tokens, grammar masks.

The equations are in `api.LogitAdjustments`. They exist in a second variant of the decode programs,
which runs only if a request of the batch needs it. B rows, V vocabulary, W words of a bitset, K
biases.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl import types
from jaxrl.data.support import WORD
from jaxrl.engine.device.sampling import Sample, SamplingParams, map_rows, sample
from jaxrl.kernels.bits import materialize, row_sum
from sharding import Rules

MAX_BIAS = 300  # biased tokens of a request, as in OpenAI's API
N_TOP = 20  # most likely tokens per position, as in OpenAI's API


@struct.dataclass
class Adjustments:
    """The LogitAdjustments of every row, as arrays."""

    repetition_penalty: types.Array  # float32 [B], 1 = off
    frequency_penalty: types.Array  # float32 [B], 0 = off
    presence_penalty: types.Array  # float32 [B], 0 = off
    bias_ids: types.Array  # int32 [B, K], V = none
    bias: types.Array  # float32 [B, K]
    min_tokens: types.Array  # int32 [B]
    prompt_len: types.Array  # int32 [B]
    allowed: types.Array  # uint32 [B, W], bits of the tokens that the grammar allows
    top_logprobs: types.Array  # bool [B]

    def penalizes(self) -> Bool[Array, ""]:
        """Whether any row needs the counts of its tokens."""
        off = (self.repetition_penalty == 1) & (self.frequency_penalty == 0)
        return jnp.any(~off | (self.presence_penalty != 0))


@struct.dataclass
class TokenCounts:
    """Tokens of every row so far."""

    n_generated: types.Array  # int32 [B, V], occurrences in the response
    in_prompt: types.Array  # bool [B, V]

    def add(
        self, rows: Int[Array, "B 1"], tokens: Int[Array, "B n"], counted: Bool[Array, "B n"]
    ) -> "TokenCounts":
        """The counts with more generated tokens, where `counted`."""
        n = self.n_generated.at[rows, tokens].add(counted.astype(jnp.int32))
        return TokenCounts(n, self.in_prompt)


@struct.dataclass
class RowState:
    """The inputs of the adjustments of each row's next token."""

    adjustments: Adjustments
    counts: TokenCounts
    stop_ids: types.Array  # int32 [B, n_stop], -1 = none
    position: types.Array  # int32 [B], of the last token


def count_tokens(
    history: Int[Array, "B S"], position: Int[Array, "B"], adjustments: Adjustments, V: int
) -> TokenCounts:
    """The counts of the tokens at positions 0 to `position`; zeros if no row has a penalty."""
    rows, index = jnp.arange(len(history))[:, None], jnp.arange(history.shape[1])
    zeros = jnp.zeros((len(history), V), jnp.int32)

    def count():
        in_prompt = index < adjustments.prompt_len[:, None]
        generated = ~in_prompt & (index <= position[:, None])
        return TokenCounts(
            zeros.at[rows, history].add(generated.astype(jnp.int32)),
            zeros.at[rows, history].add(in_prompt.astype(jnp.int32)) > 0,
        )

    return jax.lax.cond(adjustments.penalizes(), count, lambda: TokenCounts(zeros, zeros > 0))


def count_drafts(
    counts: TokenCounts, drafts: Int[Array, "B D"], live: Bool[Array, "B D"]
) -> TokenCounts:
    """Counts [B * (1 + D), V]: row (b, j) has the tokens of row b and its first j draft tokens."""
    B, D = drafts.shape
    before = jnp.arange(D + 1)[:, None] > jnp.arange(D)
    counted = (live[:, None] & before).reshape(B * (D + 1), D)
    expanded = jax.tree.map(lambda a: jnp.repeat(a, D + 1, axis=0), counts)
    rows = jnp.arange(B * (D + 1))[:, None]
    return expanded.add(rows, jnp.repeat(jnp.maximum(drafts, 0), D + 1, axis=0), counted)


def adjust(logits: Float[Array, "B V"], state: RowState) -> Float[Array, "B V"]:
    """The adjusted logits. Rows without adjustments keep theirs bit by bit."""
    a, (B, V) = state.adjustments, logits.shape
    rows, n_generated = jnp.arange(B)[:, None], state.counts.n_generated
    used = n_generated > 0
    penalty = jnp.where(used | state.counts.in_prompt, a.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits -= a.frequency_penalty[:, None] * n_generated + a.presence_penalty[:, None] * used
    logits = logits.at[rows, a.bias_ids].add(a.bias, mode="drop")
    too_early = state.position + 1 - a.prompt_len < a.min_tokens
    forbidden = jnp.where(too_early[:, None] & (state.stop_ids >= 0), state.stop_ids, V)
    logits = logits.at[rows, forbidden].set(-jnp.inf, mode="drop")
    return jnp.where(_unpack_bits(a.allowed, V), logits, -jnp.inf)


def sample_adjusted(
    logits: Float[Array, "B V"],
    uniform: Float[Array, "B"],
    params: SamplingParams,
    state: RowState,
    *,
    rules: Rules,
    keep_support: bool = False,
    never: int | None = None,
) -> Sample:
    """As `sampling.sample_sharded`, from adjusted logits.

    `logp` and the most likely tokens are of the model's distribution, softmax(logits /
    temperature), without adjustments. `behavior_logp` is of the distribution that the token was
    sampled from, with adjustments and filters.
    """

    def sample_rows(logits, uniform, params: SamplingParams, state: RowState) -> Sample:
        sampled = sample(
            adjust(logits, state), uniform, params, keep_support=keep_support, never=never
        )
        temperature = jnp.where(params.temperature <= 0, 1.0, params.temperature)
        logp = _log_softmax(materialize(logits / temperature[:, None]))
        return dataclasses.replace(
            sampled,
            logp=jnp.take_along_axis(logp, sampled.token[:, None], axis=1)[:, 0],
            top=_most_likely(logp, state.adjustments.top_logprobs),
        )

    run = map_rows(sample_rows, rules, n_rows=uniform.shape[0])
    return run(logits, uniform, params, state)


def _log_softmax(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """log softmax(logits), with the bits of `logprob.token_logp`."""
    shifted = materialize(logits - jnp.max(logits, axis=-1, keepdims=True))
    return shifted - jnp.log(row_sum(materialize(jnp.exp(shifted))))[:, None]


def _most_likely(logp: Float[Array, "B V"], wanted: Bool[Array, "B"]) -> Int[Array, "B n"]:
    """Ids of the most likely tokens and the bits of their logprobs; zeros if no row wants them."""
    n = min(N_TOP, logp.shape[1])

    def find():
        values, ids = jax.lax.top_k(logp, n)
        return jnp.concatenate([ids, jax.lax.bitcast_convert_type(values, jnp.int32)], axis=1)

    return jax.lax.cond(jnp.any(wanted), find, lambda: jnp.zeros((len(logp), 2 * n), jnp.int32))


def _unpack_bits(words: UInt32[Array, "B W"], V: int) -> Bool[Array, "B V"]:
    """The inverse of `sampling.sample`'s packed supports."""
    bits = (words[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return bits.reshape(len(words), -1)[:, :V] != 0
