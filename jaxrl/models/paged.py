"""Forward pass over a paged KV cache: rows of new tokens, or prefill mixed with decode."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.paged_attention import paged_attention, write_pages
from jaxrl.models.decoder import Decoder
from jaxrl.models.kv_cache import KVCache
from sharding import Rules

DECODE_SCOPE = "decode_rows"  # named scope of decode attention, by which the planner finds it


def forward_paged(
    model: Decoder,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: KVCache,
    page_table: Int[Array, "n C"],
    *,
    rules: Rules,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Hidden states of new tokens, whose keys are written to the cache first.

    `page_table[b, c]` is the pool page of row b's positions [c * page_len, (c + 1) * page_len). A
    position of -1 marks padding: nothing is written for it and its output is meaningless.

    Several tokens of a sequence may also be consecutive rows of one token each that share one row
    of the table: matrix products then run as in decode, and attention reads a block of keys once
    for all of them.
    """
    groups = [(page_table, positions.reshape(len(page_table), -1))]
    paged = PagedRows(groups, rules, implementation)
    return model(tokens, positions, paged, cache, live=positions >= 0, rules=rules)[:2]


def forward_mixed(
    model: Decoder,
    prefill_tokens: Int[Array, "R T"],
    prefill_positions: Int[Array, "R T"],
    prefill_table: Int[Array, "R C"],
    tokens: Int[Array, "B"],
    positions: Int[Array, "B"],
    page_table: Int[Array, "B C"],
    cache: KVCache,
    *,
    rules: Rules,
    implementation: str | None = None,
) -> tuple[Float[Array, "B 1 D"], KVCache]:
    """`forward_paged` of R rows of prefill and B rows of decode; returns the decode hidden states.

    Weights are read once for both, as one row of R * T + B tokens. Only attention treats them
    separately.
    """
    n_prefill = prefill_tokens.size
    row = jnp.concatenate([prefill_tokens.reshape(-1), tokens])[None]
    group_positions = jnp.concatenate([prefill_positions.reshape(-1), positions])[None]
    groups = [(prefill_table, prefill_positions), (page_table, positions[:, None])]
    paged = PagedRows(groups, rules, implementation)
    hidden, cache, _ = model(
        row, group_positions, paged, cache, live=group_positions >= 0, rules=rules
    )
    return jnp.swapaxes(hidden[:, n_prefill:], 0, 1), cache


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """Operations between new tokens and the tokens in a paged KV cache.

    `groups` are the page table [n, C] and the positions [n, t] of each group of tokens. The groups'
    tokens are concatenated. In every layer, the keys of all groups are written before any attends.
    """

    groups: list[tuple[jax.Array, jax.Array]]
    rules: Rules
    implementation: str | None

    def attend(self, q, k, v, spec: AttentionSpec, window, index, state: KVCache):
        k_pages, v_pages, first = state.layer_pages(index, self.rules)
        new = zip(
            self.groups,
            _by_group(k, self.groups, "kv_heads", self.rules),
            _by_group(v, self.groups, "kv_heads", self.rules),
            strict=True,
        )
        for (table, group_positions), keys, values in new:
            k_pages, v_pages = write_pages(
                k_pages, v_pages, keys, values, table + first, group_positions, rules=self.rules
            )
        outs = []
        queries = _by_group(q, self.groups, "heads", self.rules)
        for (table, group_positions), group_q in zip(self.groups, queries, strict=True):
            with jax.named_scope(DECODE_SCOPE if group_positions.shape[1] == 1 else "prefill_rows"):
                out = paged_attention(
                    group_q,
                    k_pages,
                    v_pages,
                    spec=spec,
                    page_table=table + first,
                    positions=group_positions,
                    window=window,
                    implementation=self.implementation,
                )
            outs.append(out)
        if len(self.groups) > 1:
            rows = zip(outs, self.groups, strict=True)
            outs = [_reshape_rows(out, (1, p.size), "heads", self.rules) for out, (_, p) in rows]
            outs = [jnp.concatenate(outs, axis=1)]
        out = _reshape_rows(outs[0], q.shape[:2], "heads", self.rules)
        return out, state.with_pages(k_pages, v_pages, self.rules)

    def delta(self, qk, v, g, beta, conv, index, state):
        raise NotImplementedError("the engine has no cache of the states of gated DeltaNet")


def _by_group(
    x: jax.Array, groups: list[tuple[jax.Array, jax.Array]], heads: str, rules: Rules
) -> list[jax.Array]:
    """The tokens of each group, by sequence."""
    sizes = [positions.size for _, positions in groups]
    ends = [sum(sizes[: i + 1]) for i in range(len(groups) - 1)]
    pieces = jnp.split(x, ends, axis=1) if ends else [x]
    pairs = zip(pieces, groups, strict=True)
    return [_reshape_rows(piece, p.shape, heads, rules) for piece, (_, p) in pairs]


def _reshape_rows(x: jax.Array, shape: tuple[int, ...], heads: str, rules: Rules) -> jax.Array:
    if x.shape[:2] == shape:
        return x
    out = rules.spec("batch", "time", heads, None)
    return jnp.reshape(x, (*shape, *x.shape[2:]), out_sharding=out)
