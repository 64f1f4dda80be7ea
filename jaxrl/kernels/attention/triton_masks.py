"""Masks of the Triton kernels: which blocks meet, and which queries see which keys.

The kernels are written against both masks. Inside a kernel, the arrays of a mask are references to
the blocks that its specs select.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl

from jaxrl.kernels.attention.blocks import pad_axis
from jaxrl.kernels.key_ranges import seen_by_ranges
from jaxrl.kernels.visibility import (
    Queries,
    Visibility,
    oldest_position,
    padded_range,
    seen_blocks,
    visible_pairs,
    visits,
)

BLOCK = 64  # tokens per query block and key block


@struct.dataclass
class RangeMask:
    """A query sees the keys from `first` to `last`."""

    first: Any  # int32 [B, T]
    last: Any  # int32 [B, T]; no key if smaller than `first`

    @classmethod
    def of(cls, segments, window) -> "RangeMask":
        """The mask of whole rows, padded to blocks; padding sees itself."""
        return cls(*padded_range(segments, window, BLOCK))

    def specs(self, of_queries: pl.BlockSpec, of_keys: pl.BlockSpec) -> "RangeMask":
        return RangeMask(of_queries, of_queries)

    def key_blocks(self) -> tuple[jax.Array, jax.Array]:
        """First visible key block of each query block, and the one after the last; [B, n]."""
        some = self.first <= self.last
        low = jnp.where(some, self.first, jnp.iinfo(jnp.int32).max).reshape(len(some), -1, BLOCK)
        high = jnp.where(some, self.last, -1).reshape(len(some), -1, BLOCK)
        return jnp.min(low, axis=-1) // BLOCK, jnp.max(high, axis=-1) // BLOCK + 1

    def query_blocks(self, n: int) -> tuple[jax.Array, jax.Array]:
        """First query block that sees each of n key blocks, and the one after the last; [B, n]."""
        seen = seen_by_ranges(self.first, self.last, block=BLOCK, n_keys=n * BLOCK)
        i = jnp.arange(seen.shape[1], dtype=jnp.int32)[:, None]
        begin = jnp.min(jnp.where(seen, i, seen.shape[1]), axis=1)
        return begin, jnp.max(jnp.where(seen, i + 1, 0), axis=1)

    @staticmethod
    def visits(key_blocks, b, i):
        """Bounds of the loop over the visits of a query block, and the key block of a visit."""
        low, high = key_blocks
        return low[b, i], high[b, i], lambda visit: visit

    def queries(self, at: Any = ...) -> tuple[jax.Array, ...]:
        return self.first[at], self.last[at]

    def keys(self, at: Any = ...) -> tuple[jax.Array, ...]:
        return ()

    @staticmethod
    def visible(query, queries, key, keys):
        """bool [queries, keys] of two blocks, given the places and the numbers of their tokens."""
        first, last = queries
        return (key[None] >= first[:, None]) & (key[None] <= last[:, None])


@struct.dataclass
class TreeMask:
    """The mask of rows whose segments share prefixes (kernels/visibility.py)."""

    until: Any  # int32 [B, T], of keys
    positions: Any  # int32 [B, T], of keys
    oldest: Any  # int32 [B, T], first position in the window of each query

    @classmethod
    def of(cls, segments, window, visibility: Visibility) -> "TreeMask":
        """The mask of whole rows, padded to blocks; padding sees itself."""
        B, T = segments.shape
        oldest = oldest_position(visibility.positions, window)
        # A softmax over no key is not finite.
        until = jnp.where(segments > 0, visibility.until, jnp.arange(T, dtype=jnp.int32))
        padding = jnp.arange(T, T + -T % BLOCK, dtype=jnp.int32)
        return cls(
            until=jnp.concatenate([until, jnp.broadcast_to(padding, (B, len(padding)))], axis=1),
            positions=pad_axis(visibility.positions, 1, BLOCK),
            oldest=pad_axis(jnp.where(segments > 0, oldest, 0), 1, BLOCK),
        )

    def specs(self, of_queries: pl.BlockSpec, of_keys: pl.BlockSpec) -> "TreeMask":
        return TreeMask(of_keys, of_keys, of_queries)

    def _seen(self):
        """bool [B, n, n]: which key blocks each query block visits."""
        B, T = self.until.shape
        places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        queries = Queries(places.reshape(-1, BLOCK), self.oldest.reshape(-1, BLOCK))
        return seen_blocks(queries, Visibility(self.until, self.positions), block=BLOCK)

    def key_blocks(self) -> tuple[jax.Array, jax.Array]:
        """The key blocks that each query block visits [B, n, n], and their number [B, n]."""
        return visits(self._seen())

    def query_blocks(self, n: int) -> tuple[jax.Array, jax.Array]:
        """Each key block itself, and the one after the last query block that sees it; [B, n]."""
        begin = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (len(self.until), n))
        after = jnp.arange(1, n + 1, dtype=jnp.int32)
        return begin, jnp.max(jnp.where(self._seen(), after[:, None], 0), axis=1)

    @staticmethod
    def visits(key_blocks, b, i):
        """Bounds of the loop over the visits of a query block, and the key block of a visit."""
        visited, count = key_blocks
        return 0, count[b, i], lambda visit: visited[b, i, visit]

    def queries(self, at: Any = ...) -> tuple[jax.Array, ...]:
        return (self.oldest[at],)

    def keys(self, at: Any = ...) -> tuple[jax.Array, ...]:
        return self.until[at], self.positions[at]

    @staticmethod
    def visible(query, queries, key, keys):
        """bool [queries, keys] of two blocks, given the places and the numbers of their tokens."""
        (oldest,), (until, positions) = queries, keys
        return visible_pairs(query, oldest, key, until, positions)


Mask = RangeMask | TreeMask
