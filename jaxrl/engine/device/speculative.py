"""N-gram speculative decoding: the sequence's own tokens propose drafts, the model verifies them.

Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding): the draft tokens are those
that followed the most recent earlier occurrence of the last n-gram. One forward pass runs the last
token and the draft tokens after it, and every position is sampled as usual, with the random number
of that position. A sampled token counts if all draft tokens before it equal the sampled ones. So
the tokens are those of decoding one at a time, and have the model's distribution, whatever the
drafts are. https://arxiv.org/abs/2211.17192 covers random drafts.

The KV of draft tokens is written to the positions of the true tokens, in pages that only this
sequence writes. The KV of rejected tokens is overwritten before any query attends to it. States of
gated DeltaNet advance over the accepted tokens when these are known (models/draft_states.py).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Integer

from jaxrl.engine.device.adjustments import RowState, count_drafts
from jaxrl.engine.device.decode_loop import (
    DecodeBatch,
    DecodeState,
    DispatchOutput,
    decode_loop_condition,
    row_experts,
    sample_logits,
)
from jaxrl.engine.device.sampling import N_COLUMNS, Sample, row_keys, uniforms
from jaxrl.models.adapter_stack import choose_adapters
from jaxrl.models.decoder import Decoder
from jaxrl.models.draft_states import accept_drafts, start_drafts
from jaxrl.models.kv_cache import KVCache
from jaxrl.models.paged import forward_routed
from jaxrl.models.router_replay import recording
from sharding import Rules

OUT_OF_RANGE = jnp.iinfo(jnp.int32).max  # index of a write that is dropped


@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """Limits of the n-gram proposer."""

    n_tokens: int  # draft tokens per step, at most
    n_gram: int  # length of the n-gram that is looked up, at most


def propose_drafts(
    history: Int[Array, "B S"], position: Int[Array, "B"], config: SpeculationConfig
) -> Int[Array, "B D"]:
    """Draft tokens to follow the tokens 0..position of each row.

    They are the tokens after the most recent earlier occurrence of the longest matching suffix of
    up to `n_gram` tokens. A draft that reaches the end of the history repeats from its start. -1 if
    nothing matches, and for rows with position -1.
    """
    index = jnp.arange(history.shape[1])
    matches, length = jnp.ones(history.shape, bool), jnp.zeros(history.shape, jnp.int32)
    for back in range(config.n_gram):
        suffix = jnp.take_along_axis(history, jnp.maximum(position - back, 0)[:, None], axis=1)
        matches &= (jnp.roll(history, back, axis=1) == suffix) & (index >= back)
        length += matches
    # One number to compare: match length first, then position.
    score = jnp.where(index < position[:, None], length * len(index) + index, -1)
    best = jnp.max(score, axis=1)
    match_end = (best % len(index))[:, None]
    offset = jnp.arange(config.n_tokens) % jnp.maximum(position[:, None] - match_end, 1)
    drafts = jnp.take_along_axis(history, match_end + 1 + offset, axis=1)
    return jnp.where((best >= len(index))[:, None], drafts, -1)


def speculative_steps(
    params: Decoder,
    cache: KVCache,
    batch: DecodeBatch,
    n_tokens: Int[Array, ""],
    exit_at: Int[Array, ""],
    *,
    rules: Rules,
    implementation: str | None,
    max_steps: int,
    config: SpeculationConfig,
    keep_support: bool = False,
    keep_experts: bool = False,
    never: int | None = None,
) -> tuple[KVCache, DispatchOutput, DecodeState]:
    """Up to `max_steps` forward passes of one replica and `n_tokens` tokens per sequence.

    The output has, for every row, the sampled tokens and the bits of their logprobs without gaps,
    followed by -1. Its last column has the number of passes that the row took part in, the number
    of draft tokens verified in them, and 0.
    """
    replicas, rules = rules.mesh_axes("batch"), rules.in_replica()
    (B,), W = batch.token.shape, 1 + config.n_tokens
    ahead = jnp.arange(W)
    expand = jnp.repeat(jnp.arange(B), W)
    keys = row_keys(batch.seed, batch.prompt_id, batch.sample)[expand]
    sampling, adjustments, stop_ids = jax.tree.map(
        lambda column: column[expand], (batch.sampling, batch.adjustments, batch.stop_ids)
    )
    row = jnp.arange(B)[:, None]
    adapters = batch.adapter_of_tokens
    params = choose_adapters(params, None if adapters is None else adapters[expand])
    params = recording(params) if keep_experts else params

    def one_pass(state):
        step, cache, position, remaining, history, n_sampled, token_counts, out, counts = state
        active = position >= 0
        drafts = propose_drafts(history, position, config)
        # A draft token is useful only if another token may still follow it.
        live = active[:, None] & (drafts >= 0) & (ahead[1:] < remaining[:, None])
        last = jnp.take_along_axis(history, jnp.maximum(position, 0)[:, None], axis=1)
        tokens = jnp.concatenate([last, jnp.where(live, drafts, 0)], axis=1)
        fed = jnp.concatenate([active[:, None], live], axis=1)
        positions = position[:, None] + ahead
        rotary = batch.rotary(positions)
        hidden, cache, load = forward_routed(
            params,
            tokens.reshape(B * W, 1),
            jnp.where(fed, positions, -1).reshape(B * W, 1),
            start_drafts(cache, B, W, rules),
            batch.page_tables,
            batch.slots,
            rotary=None if rotary is None else rotary.reshape(B * W, 1),
            rules=rules,
            implementation=implementation,
        )
        logits = params.logits(hidden, rules)[:, 0]
        uniform, state = uniforms(keys, positions.reshape(-1) + 1), None
        if token_counts is not None:
            seen = count_drafts(token_counts, drafts, live)
            state = RowState(adjustments, seen, stop_ids, positions.reshape(-1))
        sampled = sample_logits(
            logits,
            uniform,
            sampling,
            state,
            rules=rules,
            keep_support=keep_support,
            never=never,
        )
        token = sampled.token.reshape(B, W)

        stops = jnp.any(token[:, :, None] == batch.stop_ids[:, None], axis=2)
        counted = _counted(token, drafts, live, active, stops)
        n_new = jnp.sum(counted, axis=1)
        # A token that counts is sampled after one that was fed: that one is accepted.
        cache = accept_drafts(cache, batch.slots, counted, rules, params.cfg.gated_delta)
        column = jnp.where(counted, n_sampled[:, None] + ahead, OUT_OF_RANGE)
        experts = row_experts(load, B * W, params.cfg) if keep_experts else None
        out = _write(out, sampled, experts, row, column)
        place = jnp.where(counted, positions + 1, OUT_OF_RANGE)
        history = history.at[row, place].set(token, mode="drop")
        if token_counts is not None:
            token_counts = token_counts.add(row, token, counted)
        counts = counts.at[:2].add(jnp.stack([active, jnp.sum(live, axis=1)]).astype(jnp.int32))
        ended = (n_new >= remaining) | jnp.any(stops & counted, axis=1)
        position = jnp.where(active & ~ended, position + n_new, -1)
        remaining, n_sampled = remaining - n_new, n_sampled + n_new
        return (step + 1, cache, position, remaining, history, n_sampled, token_counts, out, counts)

    start = (
        jnp.int32(0),
        cache,
        batch.position,
        jnp.minimum(batch.remaining, n_tokens),
        batch.history,
        jnp.zeros(B, jnp.int32),
        batch.counts(params.cfg.V),
        DispatchOutput.empty(
            batch, max_steps * W, params.cfg, keep_support=keep_support, keep_experts=keep_experts
        ),
        jnp.zeros((N_COLUMNS, B), jnp.int32),
    )
    condition = decode_loop_condition(jnp.int32(max_steps), exit_at, replicas)
    end = jax.lax.while_loop(condition, one_pass, start)
    _, cache, _, _, history, n_sampled, _, out, counts = end
    columns = jnp.concatenate([out.columns, counts[:, :, None]], axis=2)
    state = _state_after(batch, history, n_sampled)
    return cache, dataclasses.replace(out, columns=columns), state


def _state_after(
    batch: DecodeBatch, history: Int[Array, "B S"], n_sampled: Int[Array, "B"]
) -> DecodeState:
    """The state of rows that have sampled so many tokens: as the loop, but without its limit."""
    position, remaining = batch.position + n_sampled, batch.remaining - n_sampled
    token = jnp.take_along_axis(history, jnp.maximum(position, 0)[:, None], axis=1)
    stopped = (n_sampled > 0) & jnp.any(token == batch.stop_ids, axis=1)
    active = (batch.position >= 0) & ~stopped & (remaining > 0)
    return DecodeState(token[:, 0], jnp.where(active, position, -1), remaining, history)


def _write(
    out: DispatchOutput,
    new: Sample,
    experts: Integer[Array, "n E"] | None,
    row: Int[Array, "B 1"],
    column: Int[Array, "B W"],
) -> DispatchOutput:
    """The output with the tokens of one pass at (row, column), out of range ones dropped."""

    def write(rows: jax.Array, wide: jax.Array) -> jax.Array:
        return rows.at[column, row].set(wide.reshape(*column.shape, -1), mode="drop")

    columns = new.columns().reshape(N_COLUMNS, *column.shape)
    return DispatchOutput(
        out.columns.at[:, row, column].set(columns, mode="drop"),
        jax.tree.map(write, out.support, new.support),
        jax.tree.map(write, out.top, new.top),
        jax.tree.map(write, out.experts, experts),
    )


def _counted(token, drafts, live, active, stops):
    """bool [B, W]: sampled tokens up to the first rejected draft token or stop token, inclusive."""
    accepted = live & (token[:, :-1] == drafts)
    continues = jnp.cumprod(accepted & ~stops[:, :-1], axis=1)
    return jnp.concatenate([active[:, None], active[:, None] & (continues > 0)], axis=1)
