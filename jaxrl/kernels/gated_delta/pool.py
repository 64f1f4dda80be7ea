"""Gated DeltaNet over the new tokens of sequences whose states are in a pool.

A sequence has a slot of the pool: the state after its last token, and the inputs of the convolution
at its last tokens. Slot 0 stays zero: new sequences start from it, and padding has it.

Letters: S slots, R rows of T tokens, K heads of queries and keys, N heads of values, W taps.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl import types
from jaxrl.kernels.gated_delta.chunk_states import product
from jaxrl.kernels.gated_delta.chunked import chunk_len, chunk_outputs, join_chunks, split_chunks
from jaxrl.kernels.gated_delta.convolution import convolve
from jaxrl.kernels.gated_delta.runs import ChunkRuns
from jaxrl.kernels.gated_delta.sharding import check_heads, shard_heads
from sharding import Rules


@struct.dataclass
class SlotRows:
    """The slots of R rows, computed in order: row r continues from `sources[r]`.

    Consecutive rows may be pieces of one sequence: then the source of a row is the target of the
    row before it, and no other row writes to that slot. The live tokens of a row come first.
    """

    sources: types.Array  # int32 [R], whose state and tail a row starts from
    targets: types.Array  # int32 [R], which get those after the row
    live: types.Array  # bool [R, T], no padding

    def last_writers(self, n_slots: int) -> Int[Array, "R"]:
        """The targets, with `n_slots` for rows whose target the next row writes again."""
        again = self.targets[:-1] == self.targets[1:]
        return jnp.where(jnp.pad(again, (0, 1)), n_slots, self.targets)


def pool_gated_delta(
    q: Float[Array, "R T K D"],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T N V"],
    g: Float[Array, "R T N"],
    beta: Float[Array, "R T N"],
    states: Float[Array, "S N D V"],
    *,
    slots: SlotRows,
    rules: Rules,
) -> tuple[Float[Array, "R T N V"], Float[Array, "S N D V"]]:
    """`gated_delta` of the tokens of each row, and the float32 states after them.

    The arguments are those of `gated_delta`, whose final states are written to the pool.
    """
    check_heads(v.shape[2], rules)
    heads, gates = rules.spec("batch", None, "heads", None), rules.spec("batch", None, "heads")
    pool, rows = rules.spec(None, "heads", None, None), jax.P()
    specs = (heads, heads, heads, gates, gates, pool, rows)
    with jax.named_scope("gated_delta"):
        args = (q, k, v, g, beta, states, slots)
        return shard_heads(_pool_gated_delta, args, specs, (heads, pool))


def _pool_gated_delta(q, k, v, g, beta, states, slots: SlotRows):
    (R, T, K, D), (N, V) = k.shape, v.shape[2:]
    C = chunk_len(T)
    live = split_chunks(slots.live, C)
    n = live.shape[0] * R  # chunks, those of a row one after the other
    ones = jnp.ones((n, 1, C), jnp.int32)
    runs = ChunkRuns(_in_order(live), ones, ones[:, :, 0])
    q, k = (_in_order(split_chunks(a, C, K)) for a in (q, k))
    v, g, beta = (_in_order(split_chunks(a, C, K, N // K)) for a in (v, g, beta))
    per_row = n // R
    targets = jnp.repeat(slots.targets, per_row)
    first = jnp.arange(n) % per_row == 0
    sources = jnp.where(first, jnp.repeat(slots.sources, per_row), targets)
    pool = states.reshape(len(states), K, N // K, D, V)
    pass_states = functools.partial(_pass_states, v.dtype, pool, sources, targets)
    out, pool = chunk_outputs(runs, pass_states, q, k, v, g, beta)
    out = join_chunks(out.reshape(R, per_row, *out.shape[2:]).swapaxes(0, 1))[:, :T]
    return out, pool.reshape(states.shape)


def _in_order(a):
    """[chunks of a row, R, ...] -> [R * chunks of a row, 1, ...]."""
    a = jnp.swapaxes(a, 0, 1)
    return a.reshape(-1, 1, *a.shape[2:])


def _pass_states(dtype, pool, sources, targets, u, w, k, weight, decay):
    """`chunk_states` of chunks in order, each from a slot of the pool to another."""

    def chunk(pool, xs):
        (u, w, k, weight, decay), source, target = xs
        # Read once, before the update: XLA on TPU otherwise reads it again after it, from a copy of
        # the whole pool.
        start = lax.dynamic_index_in_dim(pool, source, keepdims=True)
        start = lax.optimization_barrier(start)
        x = u - product("BKRCD,BKRDV->BKRCV", w, start, dtype)
        update = product("BKCD,BKRCV->BKRDV", k, weight[..., None] * x, dtype)
        end = decay[..., None, None] * start + update
        pool = lax.dynamic_update_slice_in_dim(pool, end, target, 0)
        return pool, (x.astype(dtype), start.astype(dtype))

    pool, (x, starts) = lax.scan(chunk, pool, ((u, w, k, weight, decay), sources, targets))
    return x, starts.swapaxes(-1, -2), pool


def pool_causal_conv(
    x: Float[Array, "R T N H"],
    w: Float[Array, "N H W"],
    tails: Float[Array, "S W1 N H"],
    *,
    slots: SlotRows,
    rules: Rules,
    activation: Callable = jax.nn.silu,
) -> tuple[Float[Array, "R T N H"], Float[Array, "S W1 N H"]]:
    """`causal_conv` of the tokens of each row, and the pool of its inputs at the last W - 1 tokens.

    Padding gives zeros and leaves the tail of its slot as it is.
    """
    heads, weights = rules.spec("batch", None, "heads", None), rules.spec("heads", None, None)
    pool = rules.spec(None, None, "heads", None)
    with jax.named_scope("causal_conv"):
        args, specs = (x, w, tails, slots), (heads, weights, pool, jax.P())
        local = functools.partial(_pool_causal_conv, activation=activation)
        return shard_heads(local, args, specs, (heads, pool))


def _pool_causal_conv(x, w, tails, slots: SlotRows, *, activation: Callable):
    ends = jnp.cumsum(jnp.sum(slots.live, axis=1))
    begins = ends - jnp.sum(slots.live, axis=1)
    follows = jnp.pad(slots.sources[1:] == slots.targets[:-1], (1, 0))
    # The number of tokens, of all rows, before the first row of a chain of rows.
    chains = lax.cummax(jnp.where(follows, 0, begins))
    old = tails.at[slots.sources[_chain_starts(follows)]].get(mode="clip")
    old = lax.optimization_barrier(old).astype(x.dtype)
    before = _tails_at(begins, chains, old, x, ends, begins)
    after = _tails_at(ends, chains, old, x, ends, begins)
    y, _ = convolve(x, w, slots.live.astype(jnp.int32), before, None, activation)
    return y, tails.at[slots.last_writers(len(tails))].set(after.astype(tails.dtype), mode="drop")


def step_causal_conv(
    x: Float[Array, "B T N H"],
    w: Float[Array, "N H W"],
    tails: Float[Array, "S W1 N H"],
    *,
    slots: Int[Array, "B"],
    live: Bool[Array, "B T"],
    rules: Rules,
    activation: Callable = jax.nn.silu,
) -> tuple[Float[Array, "B T N H"], Float[Array, "S W1 N H"]]:
    """`pool_causal_conv` of the next tokens of B sequences, each in its own slot."""

    def local(x, w, tails, slots, live):
        # Read once, before the update: XLA otherwise fuses further reads into the convolution and
        # into the update, and copies the whole pool for them.
        old = lax.optimization_barrier(tails[slots])
        y, after = convolve(x, w, live.astype(jnp.int32), old, None, activation)
        return y, tails.at[slots].set(after.astype(tails.dtype))

    heads, weights = rules.spec("batch", None, "heads", None), rules.spec("heads", None, None)
    pool = rules.spec(None, None, "heads", None)
    with jax.named_scope("causal_conv"):
        args, specs = (x, w, tails, slots, live), (heads, weights, pool, jax.P(), jax.P())
        return shard_heads(local, args, specs, (heads, pool))


def advance_tails(
    x: Float[Array, "B T N H"],
    tails: Float[Array, "S W1 N H"],
    *,
    slots: Int[Array, "B"],
    live: Bool[Array, "B T"],
    rules: Rules,
) -> Float[Array, "S W1 N H"]:
    """The pool of `step_causal_conv` after the live tokens, which come first, without outputs."""

    def local(x, tails, slots, live):
        old = lax.optimization_barrier(tails[slots])
        extended = jnp.concatenate([old, x.astype(tails.dtype)], axis=1)
        at = jnp.sum(live, axis=1)[:, None] + jnp.arange(tails.shape[1])
        new = jnp.take_along_axis(extended, at[..., None, None], axis=1)
        return (tails.at[slots].set(new),)

    heads, pool = rules.spec("batch", None, "heads", None), rules.spec(None, None, "heads", None)
    with jax.named_scope("causal_conv"):
        args, specs = (x, tails, slots, live), (heads, pool, jax.P(), jax.P())
        return shard_heads(local, args, specs, (pool,))[0]


def _chain_starts(follows: Bool[Array, "R"]) -> Int[Array, "R"]:
    """The first row of the chain that each row is in."""
    return lax.cummax(jnp.where(follows, 0, jnp.arange(len(follows))))


def _tails_at(at, chains, old, x, ends, begins):
    """The last W - 1 tokens [R, W - 1, N, H] before place `at[r]` of the live tokens of all rows.

    Those before the chain of row r are the last ones of `old[r]`.
    """
    R, T = x.shape[:2]
    W1 = old.shape[1]
    back = jnp.arange(W1, 0, -1)
    place = at[:, None] - back
    row = jnp.clip(jnp.searchsorted(ends, place, side="right"), 0, R - 1)
    column = jnp.clip(place - begins[row], 0, T - 1)
    new = x[row, column]
    missing = back - (at - chains)[:, None]  # how far before the chain, from 1
    kept = jnp.take_along_axis(old, jnp.clip(W1 - missing, 0, W1 - 1)[..., None, None], axis=1)
    return jnp.where((missing > 0)[..., None, None], kept, new)
