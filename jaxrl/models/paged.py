"""The decoder over keys that lie in the pages of a pool: rows of new tokens, and two kinds of rows in one pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.paged_attention import paged_attention, write_pages
from jaxrl.models.cache import KVCache
from jaxrl.models.decoder import Attend, Decoder
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
    """Hidden states of new tokens whose earlier keys lie in the cache; their own are written first.

    `page_table[b, c]` is the pool page of row b's positions [c * page_len, (c + 1) * page_len).
    A position of -1 marks padding: nothing is written for it and its output is meaningless.

    Several tokens of a sequence may also come as rows of one token each, one after the other, for one row of
    the table: products run as in decoding then, and attention reads a block of keys once for all of them.
    """
    groups = [(page_table, positions.reshape(len(page_table), -1))]
    attend = _attend_pages(model, groups, rules=rules, implementation=implementation)
    return model(tokens, positions, attend, cache, live=positions >= 0, rules=rules)[:2]


def forward_mixed(
    model: Decoder,
    fill_tokens: Int[Array, "R T"],
    fill_positions: Int[Array, "R T"],
    fill_table: Int[Array, "R C"],
    tokens: Int[Array, "B"],
    positions: Int[Array, "B"],
    page_table: Int[Array, "B C"],
    cache: KVCache,
    *,
    rules: Rules,
    implementation: str | None = None,
) -> tuple[Float[Array, "B 1 D"], KVCache]:
    """`forward_paged` of rows of T tokens and of B rows of one token, whose hidden states it returns.

    Weights are read once for both: as one row of R * T + B tokens. Only attention tells them apart.
    """
    n_filled = fill_tokens.size
    row = jnp.concatenate([fill_tokens.reshape(-1), tokens])[None]
    places = jnp.concatenate([fill_positions.reshape(-1), positions])[None]
    groups = [(fill_table, fill_positions), (page_table, positions[:, None])]
    attend = _attend_pages(model, groups, rules=rules, implementation=implementation)
    hidden, cache, _ = model(row, places, attend, cache, live=places >= 0, rules=rules)
    return jnp.swapaxes(hidden[:, n_filled:], 0, 1), cache


def _attend_pages(
    model: Decoder,
    groups: list[tuple[jax.Array, jax.Array]],
    *,
    rules: Rules,
    implementation: str | None,
) -> Attend:
    """Attention of the tokens of all `groups`, one behind the other, each a page table [n, C] and positions [n, t]:
    in every layer the keys of all of them are written before any attends."""
    spec = model.cfg.attention_spec(rules)
    ends = [sum(p.size for _, p in groups[: i + 1]) for i in range(len(groups) - 1)]

    def lay(x: jax.Array, shape: tuple[int, ...], heads: str) -> jax.Array:
        if x.shape[:2] == shape:
            return x
        out = rules.spec("batch", "time", heads, None)
        return jnp.reshape(x, (*shape, *x.shape[2:]), out_sharding=out)

    def parts(x: jax.Array, heads: str) -> list[jax.Array]:
        """Of each group, by sequence."""
        cut = jnp.split(x, ends, axis=1) if ends else [x]
        return [lay(part, p.shape, heads) for part, (_, p) in zip(cut, groups, strict=True)]

    def attend(q, k, v, window, number, cache: KVCache):
        k_pages, v_pages, first = cache.layer_pages(number, rules)
        new = zip(groups, parts(k, "kv_heads"), parts(v, "kv_heads"), strict=True)
        for (table, places), keys, values in new:
            k_pages, v_pages = write_pages(
                k_pages, v_pages, keys, values, table + first, places, rules=rules
            )
        outs = []
        for (table, places), own in zip(groups, parts(q, "heads"), strict=True):
            with jax.named_scope(DECODE_SCOPE if places.shape[1] == 1 else "prefill_rows"):
                out = paged_attention(
                    own,
                    k_pages,
                    v_pages,
                    spec=spec,
                    page_table=table + first,
                    positions=places,
                    window=window,
                    implementation=implementation,
                )
            outs.append(out)
        if ends:
            outs = [
                lay(out, (1, p.size), "heads") for out, (_, p) in zip(outs, groups, strict=True)
            ]
            outs = [jnp.concatenate(outs, axis=1)]
        out = lay(outs[0], q.shape[:2], "heads")
        return out, cache.with_pages(number, k_pages, v_pages, rules)

    return attend
