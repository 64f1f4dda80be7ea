"""Which tokens of a packed row attend to which: separate segments, or a tree of shared prefixes.

A place is a token's index in its row, a position its index in its sequence. A key is visible to the
queries of one interval of places, from its own place to `until`: the column-wise mask of FlashMask
(https://arxiv.org/abs/2410.01359). In separate segments the interval ends with the segment. Where
sequences share a prefix, the row has its tokens once, in depth-first order of the tree, and the
interval of a shared token ends with the last sequence that has it. In some models the tokens of an
image see each other: such a query also sees the keys between its own place and `ahead`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Visibility:
    """Query q attends to key k if k <= q <= until[k] and k's position is in the window of q.

    With `ahead`, it also attends to later keys of its sequence, k <= ahead[q].
    """

    until: Any  # int32 [B, T], last place that sees the token; -1 at padding
    positions: Any  # int32 [B, T]; only differences within a sequence matter
    ahead: Any = None  # int32 [B, T], last place of the token's image, or its own; None: its own


def separate_segments(segments: Int[Array, "B T"]) -> Visibility:
    """A token is visible up to the end of its segment, one run of equal numbers in its row."""
    T = segments.shape[1]
    places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), segments.shape)
    ends = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    last = lax.cummin(jnp.where(ends, places, T), axis=1, reverse=True)
    return Visibility(jnp.where(segments > 0, last, -1), places)


def visible_range(segments, window):
    """First and last visible key of every query, int32 [B, T]; last is -1 at padding.

    A segment is one run of equal numbers in its row.
    """
    T = segments.shape[1]
    here = jnp.arange(T, dtype=jnp.int32)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = lax.cummax(jnp.where(starts, here, 0), axis=1)
    first = jnp.where(window > 0, jnp.maximum(first, here - window + 1), first)
    return first, jnp.where(segments > 0, here, -1)


def padded_range(segments, window, multiple: int):
    """`visible_range` of rows padded to a multiple of a block; padding attends to itself.

    Kernels need a visible key for every query: a softmax over no key is not finite.
    """
    T = segments.shape[1]
    first, last = visible_range(segments, window)
    first = jnp.where(last >= 0, first, jnp.arange(T, dtype=jnp.int32))
    first = jnp.pad(first, ((0, 0), (0, -T % multiple)), constant_values=T)
    return first, jnp.broadcast_to(jnp.arange(first.shape[1], dtype=jnp.int32), first.shape)


def check_separate(kernel: str, visibility: Visibility | None) -> None:
    """Raises NotImplementedError for rows with shared prefixes, which `kernel` does not support."""
    if visibility is not None and visibility.ahead is not None:
        raise NotImplementedError(
            f"config.model.attention={kernel!r} does not support images whose tokens see each "
            "other; set it to 'auto'"
        )
    if visibility is not None:
        raise NotImplementedError(
            f"config.model.attention={kernel!r} does not support shared prefixes here, because a "
            "query sees one range of keys; set config.learner.shared_prefixes to 'off' or 'auto'"
        )


def oldest_position(positions: Int[Array, "*B"], window: int | jax.Array) -> Int[Array, "*B"]:
    """The first position in the window of each query; 0 without a window."""
    return jnp.where(window > 0, jnp.maximum(positions - window + 1, 0), 0)


def visible_pairs(
    query: Int[Array, "*#B M"],
    oldest: Int[Array, "*#B M"],
    key: Int[Array, "*#B S"],
    until: Int[Array, "*#B S"],
    positions: Int[Array, "*#B S"],
    ahead: Int[Array, "*#B M"] | None = None,
) -> jax.Array:
    """bool [*B, M, S]: whether queries at these places see keys at these places."""
    query, oldest = query[..., :, None], oldest[..., :, None]
    key, until, positions = (a[..., None, :] for a in (key, until, positions))
    ahead = None if ahead is None else ahead[..., :, None]
    return sees(query, oldest, key, until, positions, ahead)


def sees(query, oldest, key, until, positions, ahead=None) -> jax.Array:
    """Whether a query sees a key, elementwise over arrays that broadcast together."""
    last = query if ahead is None else ahead
    return (key <= last) & (query <= until) & (positions >= oldest)


@struct.dataclass
class Queries:
    """Places of the queries and where their windows begin, by row or by block."""

    place: Any  # int32 [n, M], in the row; -1 at padding, which sees no key
    oldest: Any  # int32 [n, M], first position in the window
    ahead: Any = None  # int32 [n, M], last place that it sees; None: its own

    @classmethod
    def of(cls, segments: jax.Array, visibility: Visibility, window: int | jax.Array):
        """The queries of whole rows [B, T]."""
        places = jnp.arange(segments.shape[1], dtype=jnp.int32)
        oldest = oldest_position(visibility.positions, window)
        ahead = visibility.ahead
        ahead = None if ahead is None else jnp.where(segments > 0, ahead, -1)
        return cls(jnp.where(segments > 0, places, -1), oldest, ahead)


def seen_blocks(
    queries: Queries, keys: Visibility, *, start: int | jax.Array = 0, block: int
) -> Bool[Array, "B n m"]:
    """Whether a block of queries may see a key of a block of `block` keys.

    Args:
      queries: [B n, M], with the n blocks of a row next to each other.
      keys: [B, S], S a multiple of `block`.
      start: place of the first key.
    """
    (B, S), never = keys.until.shape, jnp.iinfo(jnp.int32).max
    live = queries.place >= 0
    last = jnp.max(queries.place if queries.ahead is None else queries.ahead, axis=-1)
    first = jnp.min(jnp.where(live, queries.place, never), axis=-1)
    oldest = jnp.min(jnp.where(live, queries.oldest, never), axis=-1)
    last, first, oldest = (a.reshape(B, -1, 1) for a in (last, first, oldest))

    def largest(per_key: jax.Array) -> jax.Array:
        return jnp.max(per_key.reshape(B, 1, S // block, block), axis=-1)

    begins = start + block * jnp.arange(S // block, dtype=jnp.int32)
    newest = jnp.where(keys.until >= 0, keys.positions, -1)
    return (begins <= last) & (largest(keys.until) >= first) & (largest(newest) >= oldest)


def visits(seen: Bool[Array, "*B n m"]) -> tuple[Int[Array, "*B n m"], Int[Array, "*B n"]]:
    """(key blocks that each query block visits, in the order of the row, and their number)."""
    order = jnp.argsort(~seen, axis=-1, stable=True).astype(jnp.int32)
    return order, jnp.sum(seen, axis=-1, dtype=jnp.int32)
