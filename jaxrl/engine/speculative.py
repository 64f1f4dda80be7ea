"""Decoding several tokens at a time: the sequence's own past suggests drafts, the model checks them.

Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding): a draft is what followed the last time that
the sequence said what it says now. One pass of the model runs the last token and the drafts behind it, and the
token of each of their positions is drawn as ever, by that position's own random number. It counts as far as the
drafts before it are what was drawn. So tokens are those of decoding one by one, and what is drawn is drawn from the
model's distribution, whatever the drafts are; https://arxiv.org/abs/2211.17192 has the case of random drafts.

Keys of drafts are written where those of the true tokens come to lie: in pages of the sequence's own, behind
what it has. Those of wrong ones are written over before any query reaches them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxrl.engine.rows import DecodeRows, going, sample_rows
from jaxrl.engine.sampling import row_keys, uniforms
from jaxrl.models.cache import KVCache
from jaxrl.models.decoder import Decoder
from jaxrl.models.paged import forward_paged
from sharding import Rules


@dataclasses.dataclass(frozen=True)
class Drafts:
    """How they are found."""

    n_tokens: int  # of a draft, at most
    n_gram: int  # last tokens that are looked up, at most


def find_drafts(
    history: Int[Array, "B S"], position: Int[Array, "B"], how: Drafts
) -> Int[Array, "B D"]:
    """What may follow the tokens 0..position of each row: what followed the longest of the endings of up to
    `n_gram` tokens that were there before, the last time. Where that leads up to the end it goes round.
    -1 where there is nothing, and where the position is -1."""
    here = jnp.arange(history.shape[1])
    alike, length = jnp.ones(history.shape, bool), jnp.zeros(history.shape, jnp.int32)
    for back in range(how.n_gram):
        ending = jnp.take_along_axis(history, jnp.maximum(position - back, 0)[:, None], axis=1)
        alike &= (jnp.roll(history, back, axis=1) == ending) & (here >= back)
        length += alike
    # One number to compare by: length first, then place.
    found = jnp.where(here < position[:, None], length * len(here) + here, -1)
    best = jnp.max(found, axis=1)
    place = (best % len(here))[:, None]
    behind = jnp.arange(how.n_tokens) % jnp.maximum(position[:, None] - place, 1)
    drafts = jnp.take_along_axis(history, place + 1 + behind, axis=1)
    return jnp.where((best >= len(here))[:, None], drafts, -1)


def speculate_rows(
    params: Decoder,
    cache: KVCache,
    rows: DecodeRows,
    n_tokens: Int[Array, ""],
    leave_at: Int[Array, ""],
    rules: Rules,
    implementation: str | None,
    max_steps: int,
    how: Drafts,
) -> tuple[KVCache, Int[Array, "2 B S"]]:
    """`decode` of one replica, up to `max_steps` passes and `n_tokens` tokens of each row.

    Tokens and the bits of their logprobs come row by row without gaps, -1 behind them; the last column is the
    number of passes that the row took part in, and of drafts that were checked in them.
    """
    replicas, rules = rules.mesh_axes("batch"), rules.in_replica()
    (B,), W = rows.token.shape, 1 + how.n_tokens
    ahead = jnp.arange(W)
    each = jnp.repeat(jnp.arange(B), W)
    keys = row_keys(rows.seed, rows.prompt_id, rows.sample)[each]
    sampling = jax.tree.map(lambda column: column[each], rows.sampling)
    row = jnp.arange(B)[:, None]

    def one_pass(state):
        step, cache, position, room, history, n_made, out, counts = state
        active = position >= 0
        drafts = find_drafts(history, position, how)
        # A draft is of use where a token may still follow it.
        live = active[:, None] & (drafts >= 0) & (ahead[1:] < room[:, None])
        last = jnp.take_along_axis(history, jnp.maximum(position, 0)[:, None], axis=1)
        tokens = jnp.concatenate([last, jnp.where(live, drafts, 0)], axis=1)
        fed = jnp.concatenate([active[:, None], live], axis=1)
        places = position[:, None] + ahead
        hidden, cache = forward_paged(
            params,
            tokens.reshape(B * W, 1),
            jnp.where(fed, places, -1).reshape(B * W, 1),
            cache,
            rows.page_table,
            rules=rules,
            implementation=implementation,
        )
        logits = params.logits(hidden, rules)[:, 0]
        uniform = uniforms(keys, places.reshape(-1) + 1)
        token, logp = sample_rows(logits, uniform, sampling, rules=rules)
        token, logp = token.reshape(B, W), logp.reshape(B, W)

        right = live & (token[:, :-1] == drafts)
        stops = jnp.any(token[:, :, None] == rows.stop_ids[:, None], axis=2)
        goes_on = jnp.cumprod(right & ~stops[:, :-1], axis=1)
        made = jnp.concatenate([active[:, None], active[:, None] & (goes_on > 0)], axis=1)
        n_new = jnp.sum(made, axis=1)
        nowhere = jnp.iinfo(jnp.int32).max
        column = jnp.where(made, n_made[:, None] + ahead, nowhere)
        bits = jax.lax.bitcast_convert_type(logp, jnp.int32)
        out = out.at[:, row, column].set(jnp.stack([token, bits]), mode="drop")
        history = history.at[row, jnp.where(made, places + 1, nowhere)].set(token, mode="drop")
        counts += jnp.stack([active, jnp.sum(live, axis=1)]).astype(jnp.int32)
        ended = (n_new >= room) | jnp.any(stops & made, axis=1)
        position = jnp.where(active & ~ended, position + n_new, -1)
        room, n_made = room - n_new, n_made + n_new
        return step + 1, cache, position, room, history, n_made, out, counts

    start = (
        jnp.int32(0),
        cache,
        rows.position,
        jnp.minimum(rows.remaining, n_tokens),
        rows.history,
        jnp.zeros(B, jnp.int32),
        jnp.full((2, B, max_steps * W), -1, jnp.int32),
        jnp.zeros((2, B), jnp.int32),
    )
    enough = going(jnp.int32(max_steps), leave_at, replicas)
    _, cache, *_, out, counts = jax.lax.while_loop(enough, one_pass, start)
    return cache, jnp.concatenate([out, counts[:, :, None]], axis=2)


@dataclasses.dataclass(frozen=True)
class Made:
    """What the rows of a dispatch made, read from the array that it returns."""

    tokens: (
        np.ndarray
    )  # int32 [2, B, n]: tokens without gaps, -1 behind them, and the bits of their logprobs
    n_steps: int  # passes of the model
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def n_tokens(self) -> int:
        return int((self.tokens[0] >= 0).sum())


def read_made(out: np.ndarray, drafts: Drafts | None) -> Made:
    if drafts is None:
        n_steps = int((out[0] >= 0).any(axis=0).sum())
        return Made(out[..., :n_steps], n_steps)
    tokens, (passes, drafted) = out[..., :-1], out[..., -1]
    n_accepted = int((tokens[0] >= 0).sum() - passes.sum())
    return Made(tokens, int(passes.max()), int(drafted.sum()), n_accepted)
