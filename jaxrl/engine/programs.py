"""What runs on the device: prefill rows, alone or beside a decode step, copy pages, decode many steps.
The KV pool is donated to each of them and comes back updated in place."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl.engine.rows import DecodeRows, going, sample_rows
from jaxrl.engine.sampling import SamplingParams, row_keys, uniforms
from jaxrl.engine.speculative import Drafts, speculate_rows
from jaxrl.models.cache import KVCache
from jaxrl.models.decoder import Decoder
from jaxrl.models.paged import forward_mixed, forward_paged
from jaxrl.types import Tree
from sharding import Rules


def by_replica(
    program: Callable, rules: Rules, *, cache_axis: int, n_rows: int, gives_rows: bool = False
) -> Callable:
    """`program(params, cache, *rows)` of one replica, run by each of the rules' on its own part.

    The replicas share the pages of the cache, its axis `cache_axis`, and the leading axis of `n_rows` trees of
    rows; parameters they have in full. Nothing but the end of a decode loop is exchanged between them.
    """
    axes = rules.mesh_axes("batch")
    if not axes:
        return program
    pages, by_row = jax.P(*(None,) * cache_axis, axes), jax.P(axes)
    every = jax.shard_map(
        program,
        in_specs=(jax.P(), pages, *(by_row,) * n_rows),
        out_specs=(pages, jax.P(None, axes)) if gives_rows else pages,
        axis_names=set(axes),
        check_vma=False,
    )

    def run(params: Tree, cache: KVCache, *rows: Tree):
        return every(params, cache, *jax.tree.map(lambda a: jax.reshard(a, by_row), rows))

    return run


@functools.partial(jax.jit, static_argnames=("rules", "implementation"), donate_argnames="cache")
def prefill(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    page_table: Int[Array, "B C"],
    *,
    rules: Rules,
    implementation: str | None,
) -> KVCache:
    """Writes the keys and values of `tokens`. Rows may be consecutive pieces of one sequence: every
    layer writes the keys of all rows before any row attends."""

    def fill(params: Decoder, cache: KVCache, tokens, positions, page_table) -> KVCache:
        how = {"rules": rules.in_replica(), "implementation": implementation}
        return forward_paged(params, tokens, positions, cache, page_table, **how)[1]

    run = by_replica(fill, rules, cache_axis=int(params.cfg.stacked), n_rows=3)
    return run(params, cache, tokens, positions, page_table)


@functools.partial(jax.jit, static_argnames=("rules", "implementation"), donate_argnames="cache")
def mixed(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    page_table: Int[Array, "R C"],
    rows: DecodeRows,
    *,
    rules: Rules,
    implementation: str | None,
) -> tuple[KVCache, Int[Array, "2 B 1"]]:
    """`prefill`, and one step of `decode` for sequences whose keys were there before, in one pass of the model."""

    def both(params: Decoder, cache: KVCache, tokens, positions, page_table, rows: DecodeRows):
        how = {"rules": rules.in_replica(), "implementation": implementation}
        step = rows.token, rows.position, rows.page_table
        hidden, cache = forward_mixed(params, tokens, positions, page_table, *step, cache, **how)
        keys = row_keys(rows.seed, rows.prompt_id, rows.sample)
        made, _ = _draw(params, hidden, keys, rows.position, rows.sampling, how["rules"])
        return cache, made[:, :, None]

    run = by_replica(both, rules, cache_axis=int(params.cfg.stacked), n_rows=4, gives_rows=True)
    cache, out = run(params, cache, tokens, positions, page_table, rows)
    return cache, jax.reshard(out, jax.P())


@functools.partial(jax.jit, static_argnames=("rules", "stacked"), donate_argnames="cache")
def copy_pages(
    cache: KVCache,
    sources: Int[Array, "n"],
    targets: Int[Array, "n"],
    *,
    rules: Rules,
    stacked: bool,
) -> KVCache:
    """targets[i] <- sources[i] in every layer; a target past the end of the pool is padding."""
    lead = (slice(None),) if stacked else ()

    def copy(_, cache: KVCache, sources, targets) -> KVCache:
        def one(pages: jax.Array) -> jax.Array:
            axes = (*(None,) * len(lead), None, "kv_heads")
            spec = rules.in_replica().spec(*axes, *(None,) * (pages.ndim - len(axes)))
            rows = pages.at[(*lead, sources)].get(out_sharding=spec)
            return pages.at[(*lead, targets)].set(rows, mode="drop", out_sharding=spec)

        return jax.tree.map(one, cache)

    return by_replica(copy, rules, cache_axis=len(lead), n_rows=2)(None, cache, sources, targets)


@functools.partial(
    jax.jit,
    static_argnames=("rules", "implementation", "max_steps", "drafts"),
    donate_argnames="cache",
)
def decode(
    params: Decoder,
    cache: KVCache,
    rows: DecodeRows,
    n_steps: Int[Array, ""],
    leave_at: Int[Array, ""],
    *,
    rules: Rules,
    implementation: str | None,
    max_steps: int,
    drafts: Drafts | None = None,
) -> tuple[KVCache, Int[Array, "2 B S"]]:
    """Up to `n_steps` steps, fewer once `leave_at` or fewer sequences are still going in each replica.

    Returns the cache and, of every step, the sampled token (-1: the row had ended) and the bits of
    its float32 logprob. With `drafts` a step is up to 1 + drafts.n_tokens tokens, and what is returned is that of
    `speculate_rows`.
    """

    def steps(params: Decoder, cache: KVCache, rows: DecodeRows):
        how = (rules, implementation, max_steps)
        if drafts is not None:
            return speculate_rows(params, cache, rows, n_steps, leave_at, *how, drafts)
        return _decode_rows(params, cache, rows, n_steps, leave_at, *how)

    run = by_replica(steps, rules, cache_axis=int(params.cfg.stacked), n_rows=1, gives_rows=True)
    cache, out = run(params, cache, rows)
    return cache, jax.reshard(out, jax.P())


def _decode_rows(
    params, cache, rows: DecodeRows, n_steps, leave_at, rules: Rules, implementation, max_steps
):
    """`decode` of one replica."""
    replicas, rules = rules.mesh_axes("batch"), rules.in_replica()
    keys = row_keys(rows.seed, rows.prompt_id, rows.sample)
    B = rows.token.shape[0]

    def one_step(state):
        step, cache, position, token, remaining, out = state
        active = position >= 0
        hidden, cache = forward_paged(
            params,
            token[:, None],
            position[:, None],
            cache,
            rows.page_table,
            rules=rules,
            implementation=implementation,
        )
        made, token = _draw(params, hidden, keys, position, rows.sampling, rules)
        out = jax.lax.dynamic_update_slice(out, made[:, :, None], (0, 0, step))
        ended = (remaining <= 1) | jnp.any(token[:, None] == rows.stop_ids, axis=1)
        position = jnp.where(active & ~ended, position + 1, -1)
        return step + 1, cache, position, token, remaining - 1, out

    start = (
        jnp.int32(0),
        cache,
        rows.position,
        rows.token,
        rows.remaining,
        jnp.full((2, B, max_steps), -1, jnp.int32),
    )
    _, cache, _, _, _, out = jax.lax.while_loop(going(n_steps, leave_at, replicas), one_step, start)
    return cache, out


def _draw(
    params: Decoder, hidden, keys, position, sampling: SamplingParams, rules: Rules
) -> tuple[Int[Array, "2 B"], Int[Array, "B"]]:
    """The token behind each hidden state [B, 1, D] at `position`: -1 where that is -1, with the bits of its
    logprob; and as it was drawn."""
    logits = params.logits(hidden, rules)[:, 0]
    token, logp = sample_rows(logits, uniforms(keys, position + 1), sampling, rules=rules)
    bits = jax.lax.bitcast_convert_type(logp, jnp.int32)
    return jnp.stack([jnp.where(position >= 0, token, -1), bits]), token
