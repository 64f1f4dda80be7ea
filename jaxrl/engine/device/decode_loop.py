"""The decode loop of one replica: its batch, its steps, and its output, also on the host."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Integer, Key

from jaxrl import types
from jaxrl.data.support import from_bits, n_words, unrestricted
from jaxrl.engine.api import TopTokens
from jaxrl.engine.device.adjustments import (
    N_TOP,
    Adjustments,
    RowState,
    TokenCounts,
    count_tokens,
    sample_adjusted,
)
from jaxrl.engine.device.sampling import (
    N_COLUMNS,
    Sample,
    SamplingParams,
    row_keys,
    sample_sharded,
    uniforms,
)
from jaxrl.engine.sequence import Sequence
from jaxrl.models.adapter_stack import choose_adapters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder
from jaxrl.models.kv_cache import KVCache
from jaxrl.models.layers.router import RouterLoad
from jaxrl.models.paged import PageTables, forward_routed
from jaxrl.models.router_replay import expert_dtype, recorded, recording, routing_shape
from jaxrl.types import TokenSets
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
    page_tables: PageTables  # of B rows
    sampling: SamplingParams
    # int32 [B, S], all tokens so far; None without speculation and adjustments
    history: types.Array = None
    adjustments: Adjustments | None = None  # None if no row has any: then the program has none
    adapter: types.Array = None  # int32 [B], 0 = none; None for an engine without adapters
    slots: types.Array = None  # int32 [B], of the sequences' states; None for models without any
    # int32 [B], rotary position - index of tokens after images; None: no images
    delta: types.Array = None

    @property
    def state(self) -> "DecodeState":
        return DecodeState(self.token, self.position, self.remaining, self.history)

    def with_state(self, state: "DecodeState") -> "DecodeBatch":
        return dataclasses.replace(self, **vars(state))

    @property
    def adapter_of_tokens(self) -> jax.Array | None:
        """int32 [B, 1], for one token per row."""
        return None if self.adapter is None else self.adapter[:, None]

    def rotary(self, position: Int[Array, "B *W"]) -> Int[Array, "B *W"] | None:
        """The positions that rotate the tokens at these positions; None: they do."""
        if self.delta is None:
            return None
        return position + self.delta.reshape(-1, *(1,) * (position.ndim - 1))

    def counts(self, n_vocab: int) -> TokenCounts | None:
        """The counts that the adjustments need."""
        if self.adjustments is None:
            return None
        return count_tokens(self.history, self.position, self.adjustments, n_vocab)

    def row_state(self, counts: TokenCounts | None, position: jax.Array) -> RowState | None:
        """The inputs of the adjustments of the tokens after `position`."""
        if self.adjustments is None or counts is None:
            return None
        return RowState(self.adjustments, counts, self.stop_ids, position)


@struct.dataclass
class DecodeState:
    """The arrays of a `DecodeBatch` that decode steps change: those of the next dispatch."""

    token: types.Array
    position: types.Array  # -1 once the sequence has ended
    remaining: types.Array
    history: types.Array = None  # only with speculation


def state_spec(rules: Rules, n_axes: int) -> jax.P:
    """The sharding of an array of a `DecodeState`, as `decode` takes and returns it.

    It names every axis, as that of a result does: another form would be another program.
    """
    return jax.P(rules.mesh_axes("batch") or None, *(None,) * (n_axes - 1))


@struct.dataclass
class DispatchOutput:
    """Sampled tokens of one dispatch, on the device."""

    columns: types.Array  # int32 [3, B, S], the tokens and the bits of their logprobs
    support: types.Array = None  # uint32 [S, B, W], see `Sample.support`
    top: types.Array = None  # int32 [S, B, 2 * n], see `Sample.top`
    experts: types.Array = None  # uint8 or uint16 [S, B, L * k], that sampled the tokens

    @classmethod
    def empty(
        cls,
        batch: DecodeBatch,
        S: int,
        cfg: DecoderConfig,
        *,
        keep_support: bool,
        keep_experts: bool,
    ) -> "DispatchOutput":
        """No tokens, in S columns; with adjustments it keeps the most likely ones."""
        n_vocab = cfg.V
        (B,), n_top = batch.token.shape, 2 * min(N_TOP, n_vocab)
        kept = keep_support and batch.sampling.filtered
        support = jnp.zeros((S, B, n_words(n_vocab)), jnp.uint32) if kept else None
        top = None if batch.adjustments is None else jnp.zeros((S, B, n_top), jnp.int32)
        experts = None
        if keep_experts:
            experts = jnp.zeros((S, B, math.prod(routing_shape(cfg))), expert_dtype(cfg))
        return cls(jnp.full((N_COLUMNS, B, S), -1, jnp.int32), support, top, experts)

    def with_experts(self, load: RouterLoad | None, cfg: DecoderConfig) -> "DispatchOutput":
        """The output of one step with the experts of its rows, the last ones of the load."""
        return dataclasses.replace(
            self, experts=row_experts(load, self.columns.shape[1], cfg)[None]
        )

    def at_step(self, step: Int[Array, ""], new: "DispatchOutput") -> "DispatchOutput":
        """The output with the tokens of one step written to column `step`."""

        def write(rows: jax.Array, one: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(rows, one, (step, 0, 0))

        return DispatchOutput(
            jax.lax.dynamic_update_slice(self.columns, new.columns, (0, 0, step)),
            jax.tree.map(write, self.support, new.support),
            jax.tree.map(write, self.top, new.top),
            jax.tree.map(write, self.experts, new.experts),
        )


def row_experts(load: RouterLoad | None, n: int, cfg: DecoderConfig) -> Integer[Array, "n E"]:
    """The experts [n, L * k] of the last `n` tokens of a forward pass, one of each row."""
    experts = recorded(load, expert_dtype(cfg))
    return experts.reshape(-1, math.prod(routing_shape(cfg)))[-n:]


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
    keep_experts: bool = False,
    never: int | None = None,
) -> tuple[KVCache, DispatchOutput, DecodeState]:
    """Up to `n_steps` decode steps of one replica.

    Returns the cache and, for every step, the sampled token (-1 once the sequence has ended), the
    bits of its float32 logprobs, its support with `keep_support` and its experts with
    `keep_experts`; then the state after them.
    """
    replicas, rules = rules.mesh_axes("batch"), rules.in_replica()
    keys = row_keys(batch.seed, batch.prompt_id, batch.sample)
    B = batch.token.shape[0]
    params = choose_adapters(params, batch.adapter_of_tokens)
    params = recording(params) if keep_experts else params
    forward = functools.partial(forward_routed, rules=rules, implementation=implementation)

    def one_step(state):
        step, cache, position, token, remaining, counts, out = state
        active = position >= 0
        rows = token[:, None], position[:, None]
        hidden, cache, load = forward(
            params,
            *rows,
            cache,
            batch.page_tables,
            batch.slots,
            rotary=batch.rotary(position[:, None]),
        )
        new, token = sample_tokens(
            params,
            hidden,
            keys,
            position,
            batch,
            counts,
            rules,
            keep_support=keep_support,
            never=never,
        )
        out = out.at_step(step, new.with_experts(load, params.cfg) if keep_experts else new)
        if counts is not None:
            counts = counts.add(jnp.arange(B)[:, None], token[:, None], active[:, None])
        ended = (remaining <= 1) | jnp.any(token[:, None] == batch.stop_ids, axis=1)
        position = jnp.where(active & ~ended, position + 1, -1)
        return step + 1, cache, position, token, remaining - 1, counts, out

    start = (
        jnp.int32(0),
        cache,
        batch.position,
        batch.token,
        batch.remaining,
        batch.counts(params.cfg.V),
        DispatchOutput.empty(
            batch, max_steps, params.cfg, keep_support=keep_support, keep_experts=keep_experts
        ),
    )
    condition = decode_loop_condition(n_steps, exit_at, replicas)
    _, cache, position, token, remaining, _, out = jax.lax.while_loop(condition, one_step, start)
    return cache, out, DecodeState(token, position, remaining)


def sample_tokens(
    params: Decoder,
    hidden: Float[Array, "B 1 D"],
    keys: Key[Array, "B"],
    position: Int[Array, "B"],
    batch: DecodeBatch,
    counts: TokenCounts | None,
    rules: Rules,
    *,
    keep_support: bool,
    never: int | None = None,
) -> tuple[DispatchOutput, Int[Array, "B"]]:
    """Samples the token after each `position`, which is not the token `never`.

    Returns the output of one step, with the token -1 in padding rows, and the token as sampled.
    """
    logits = params.logits(hidden, rules)[:, 0]
    sampled = sample_logits(
        logits,
        uniforms(keys, position + 1),
        batch.sampling,
        batch.row_state(counts, position),
        rules=rules,
        keep_support=keep_support,
        never=never,
    )
    token = jnp.where(position >= 0, sampled.token, -1)
    columns = dataclasses.replace(sampled, token=token).columns()[:, :, None]
    support, top = (None if a is None else a[None] for a in (sampled.support, sampled.top))
    return DispatchOutput(columns, support, top), sampled.token


def sample_logits(
    logits: Float[Array, "B V"],
    uniform: Float[Array, "B"],
    sampling: SamplingParams,
    state: RowState | None,
    *,
    rules: Rules,
    keep_support: bool,
    never: int | None = None,
) -> Sample:
    """Samples from the logits, adjusted if there is a state."""
    draw = sample_sharded
    if state is not None:
        draw = functools.partial(sample_adjusted, state=state)
    return draw(logits, uniform, sampling, rules=rules, keep_support=keep_support, never=never)


@dataclasses.dataclass(frozen=True)
class DecodeRound:
    """A dispatch with decode steps whose tokens were not read yet."""

    seqs: list[list[Sequence]]
    batch: DecodeBatch
    output: DispatchOutput
    n_steps: int = 1
    exit_at: int = 0
    state: DecodeState | None = None  # on the device, after its steps; None: mixed with prefill
    adjusted: bool = False

    @property
    def n_running(self) -> int:
        """Sequences of the replica that has most of them, without those that have ended."""
        return max(sum([seq.running for seq in own]) for own in self.seqs)


@dataclasses.dataclass(frozen=True)
class DecodeOutput:
    """Sampled tokens of one dispatch, on the host."""

    tokens: np.ndarray  # int32 [B, n], without gaps, then -1
    n_new: np.ndarray  # int64 [B], tokens of each row
    stopped: np.ndarray  # bool [B], whether the last one is a stop token
    logp: np.ndarray  # float32 [B, n]
    behavior_logp: np.ndarray  # float32 [B, n]
    support: np.ndarray | None  # uint32 [n, B, W]; None if not recorded, or without a filter
    top: np.ndarray | None  # int32 [n, B, 2 * N_TOP], see `Sample.top`; None if no row wants it
    n_steps: int  # forward passes
    experts: np.ndarray | None = None  # uint8 or uint16 [n, B, L * k]; None if not recorded
    n_draft_tokens: int = 0
    n_accepted_tokens: int = 0

    @property
    def n_tokens(self) -> int:
        return int(self.n_new.sum())

    def views(self) -> list[tuple[np.ndarray, ...]]:
        """(tokens, logp, behavior_logp) of each row, without what follows its last token."""
        width = self.tokens.shape[1]
        # Iterating over rows makes a view in a third of the time of an index.
        rows = zip(self.tokens, self.logp, self.behavior_logp, strict=True)
        return [
            row if n == width else tuple([values[:n] for values in row])
            for n, row in zip(self.n_new.tolist(), rows, strict=True)
        ]

    def top_tokens(self, row: int, n: int) -> TopTokens | None:
        """The most likely tokens at the first `n` positions of a row."""
        if self.top is None:
            return None
        ids, bits = np.split(self.top[:n, row], 2, axis=1)
        return TopTokens(ids.copy(), bits.copy().view(np.float32))

    def row_experts(self, row: int, n: int, routing: tuple[int, int]) -> np.ndarray:
        """The experts [n, L, k] that sampled the first `n` tokens of a row."""
        assert self.experts is not None
        return self.experts[:n, row].reshape(n, *routing)

    def kept_tokens(self, row: int, n: int) -> TokenSets:
        """The tokens that the filters kept at the first `n` positions of a row."""
        return unrestricted(n) if self.support is None else from_bits(self.support[:n, row])


def read_decode_output(dispatched: DecodeRound, *, speculative: bool) -> DecodeOutput:
    """Copies what `decode_steps` or, if `speculative`, `speculative_steps` returned to the host.

    The supports are copied only if one of the sequences samples from a truncated distribution, and
    the most likely tokens only if one wants them.
    """
    output, stop_ids = dispatched.output, dispatched.batch.stop_ids
    requests = [seq.request for own in dispatched.seqs for seq in own]
    out, support, top = np.asarray(output.columns), output.support, output.top
    experts = None if output.experts is None else np.asarray(output.experts)
    if support is not None:
        filtered = any(request.sampling.filters for request in requests)
        support = np.asarray(support) if filtered else None
    if top is not None:
        top = np.asarray(top) if any(request.top_logprobs for request in requests) else None
    if not speculative:
        n_steps = int((out[0] >= 0).any(axis=0).sum())
        columns = out[..., : max(n_steps, 1)]  # a round may have made no step
        found = decode_output(columns, stop_ids, support, top, n_steps)
        return dataclasses.replace(found, experts=experts)
    columns, (n_passes, n_draft_tokens, _) = out[..., :-1], out[..., -1]
    found = decode_output(columns, stop_ids, support, top, int(n_passes.max()))
    return dataclasses.replace(
        found,
        experts=experts,
        n_draft_tokens=int(n_draft_tokens.sum()),
        n_accepted_tokens=found.n_tokens - int(n_passes.sum()),
    )


def decode_output(
    columns: np.ndarray,
    stop_ids: np.ndarray,
    support: np.ndarray | None,
    top: np.ndarray | None,
    n_steps: int,
) -> DecodeOutput:
    """The output with these `Sample.columns` [3, B, n] of rows with stop ids [B, n_stop]."""
    tokens, *bits = columns
    n_new = np.sum(tokens >= 0, axis=1)
    last = np.take_along_axis(tokens, np.maximum(n_new - 1, 0)[:, None], axis=1)
    stopped = np.any((last == stop_ids) & (last >= 0), axis=1)
    logp, behavior_logp = (column.view(np.float32) for column in bits)
    return DecodeOutput(tokens, n_new, stopped, logp, behavior_logp, support, top, n_steps)
