"""The decode loop of one replica: its batch, its loop condition, its steps, and its output."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Key

from jaxrl import types
from jaxrl.data.support import n_words
from jaxrl.engine.sampling import (
    N_COLUMNS,
    SamplingParams,
    row_keys,
    sample_sharded,
    uniforms,
)
from jaxrl.models.cache import KVCache
from jaxrl.models.decoder import Decoder
from jaxrl.models.paged import forward_paged
from sharding import Rules


@struct.dataclass
class DecodeBatch:
    """The sequences of one dispatch, B rows. A row with position -1 is padding."""

    token: types.Array  # int32 [B], last token of the sequence
    position: types.Array  # int32 [B], position of that token
    remaining: types.Array  # int32 [B], tokens that may still be sampled
    seed: types.Array  # uint32 [B]
    prompt_id: types.Array  # uint32 [B]
    sample: types.Array  # uint32 [B]
    stop_ids: types.Array  # int32 [B, n_stop], -1 = none
    page_table: types.Array  # int32 [B, C]
    sampling: SamplingParams
    history: types.Array = None  # int32 [B, S], all tokens so far; None without speculation


@struct.dataclass
class DispatchOutput:
    """Sampled tokens of one dispatch, on the device."""

    columns: types.Array  # int32 [3, B, S], the tokens and the bits of their logprobs
    support: types.Array = None  # uint32 [S, B, W], see `Sample.support`

    @classmethod
    def empty(cls, B: int, S: int, *, n_vocab: int) -> "DispatchOutput":
        """No tokens; with supports if `n_vocab` is positive."""
        support = jnp.zeros((S, B, n_words(n_vocab)), jnp.uint32) if n_vocab else None
        return cls(jnp.full((N_COLUMNS, B, S), -1, jnp.int32), support)

    def at_step(self, step: Int[Array, ""], new: "DispatchOutput") -> "DispatchOutput":
        """The output with the tokens of one step written to column `step`."""
        columns = jax.lax.dynamic_update_slice(self.columns, new.columns, (0, 0, step))
        support = self.support
        if support is not None:
            support = jax.lax.dynamic_update_slice(support, new.support, (step, 0, 0))
        return DispatchOutput(columns, support)


def decode_loop_condition(
    n_steps: Int[Array, ""], exit_at: Int[Array, ""], replicas: tuple[str, ...]
) -> Callable[[tuple], jax.Array]:
    """The condition of a decode loop whose state begins with (step, cache, position).

    The loop continues for up to `n_steps` steps while a replica has more than `exit_at` running
    sequences. All replicas make the same number of steps.
    """

    def condition(state: tuple) -> jax.Array:
        step, _, position, *_ = state
        n_running = jnp.sum(position >= 0)
        if replicas:
            n_running = jax.lax.pmax(n_running, replicas)
        return (step < n_steps) & (n_running > exit_at)

    return condition


def decode_steps(
    params: Decoder,
    cache: KVCache,
    batch: DecodeBatch,
    n_steps: Int[Array, ""],
    exit_at: Int[Array, ""],
    *,
    rules: Rules,
    implementation: str | None,
    max_steps: int,
    keep_support: bool = False,
) -> tuple[KVCache, DispatchOutput]:
    """Up to `n_steps` decode steps of one replica.

    Returns the cache and, for every step, the sampled token (-1 once the sequence has ended), the
    bits of its float32 logprobs, and its support with `keep_support`.
    """
    replicas, rules = rules.mesh_axes("batch"), rules.in_replica()
    keys = row_keys(batch.seed, batch.prompt_id, batch.sample)
    B = batch.token.shape[0]

    def one_step(state):
        step, cache, position, token, remaining, out = state
        active = position >= 0
        hidden, cache = forward_paged(
            params,
            token[:, None],
            position[:, None],
            cache,
            batch.page_table,
            rules=rules,
            implementation=implementation,
        )
        new, token = sample_tokens(
            params, hidden, keys, position, batch.sampling, rules, keep_support=keep_support
        )
        out = out.at_step(step, new)
        ended = (remaining <= 1) | jnp.any(token[:, None] == batch.stop_ids, axis=1)
        position = jnp.where(active & ~ended, position + 1, -1)
        return step + 1, cache, position, token, remaining - 1, out

    start = (
        jnp.int32(0),
        cache,
        batch.position,
        batch.token,
        batch.remaining,
        DispatchOutput.empty(B, max_steps, n_vocab=params.cfg.V if keep_support else 0),
    )
    condition = decode_loop_condition(n_steps, exit_at, replicas)
    _, cache, _, _, _, out = jax.lax.while_loop(condition, one_step, start)
    return cache, out


def sample_tokens(
    params: Decoder,
    hidden: Float[Array, "B 1 D"],
    keys: Key[Array, "B"],
    position: Int[Array, "B"],
    sampling: SamplingParams,
    rules: Rules,
    *,
    keep_support: bool,
) -> tuple[DispatchOutput, Int[Array, "B"]]:
    """Samples the token after each `position`.

    Returns the output of one step, with the token -1 in padding rows, and the token as sampled.
    """
    logits = params.logits(hidden, rules)[:, 0]
    uniform = uniforms(keys, position + 1)
    sampled = sample_sharded(logits, uniform, sampling, rules=rules, keep_support=keep_support)
    token = jnp.where(position >= 0, sampled.token, -1)
    columns = dataclasses.replace(sampled, token=token).columns()[:, :, None]
    support = None if sampled.support is None else sampled.support[None]
    return DispatchOutput(columns, support), sampled.token


@dataclasses.dataclass(frozen=True)
class DecodeOutput:
    """Sampled tokens of one dispatch, on the host."""

    tokens: np.ndarray  # int32 [B, n], without gaps, then -1
    logp: np.ndarray  # float32 [B, n]
    behavior_logp: np.ndarray  # float32 [B, n]
    support: np.ndarray | None  # uint32 [n, B, W]; None if not recorded, or without a filter
    n_steps: int  # forward passes
    n_draft_tokens: int = 0
    n_accepted_tokens: int = 0

    @property
    def n_tokens(self) -> int:
        return int((self.tokens >= 0).sum())


def read_decode_output(
    output: DispatchOutput, *, filtered: bool, speculative: bool = False
) -> DecodeOutput:
    """Copies what `decode_steps` or, if `speculative`, `speculative_steps` returned to the host.

    The supports are copied only if a sequence of the dispatch is `filtered`.
    """
    out = np.asarray(output.columns)
    support = np.asarray(output.support) if filtered and output.support is not None else None
    if not speculative:
        n_steps = int((out[0] >= 0).any(axis=0).sum())
        return DecodeOutput(*_columns(out[..., :n_steps]), support, n_steps)
    columns, (n_passes, n_draft_tokens, _) = out[..., :-1], out[..., -1]
    n_accepted_tokens = int((columns[0] >= 0).sum() - n_passes.sum())
    return DecodeOutput(
        *_columns(columns),
        support,
        int(n_passes.max()),
        int(n_draft_tokens.sum()),
        n_accepted_tokens,
    )


def _columns(out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, *bits = out
    return tokens, *(column.view(np.float32) for column in bits)
