"""Masks of the Triton kernels: which blocks meet, and which queries see which keys.

The kernels are written against both masks. Inside a kernel, the arrays of a mask are references to
the blocks that its specs select.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl

from jaxrl.kernels.attention.limits import BLOCK
from jaxrl.kernels.attention.online_softmax import pad_axis
from jaxrl.kernels.key_ranges import seen_by_ranges
from jaxrl.kernels.visibility import (
    Queries,
    Visibility,
    oldest_position,
    padded_range,
    seen_blocks,
    sees,
    visits,
)


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

    def key_blocks(self, own: int) -> tuple[jax.Array, jax.Array]:
        """First visible key block of each `own` queries, and the one after the last; [B, n]."""
        some = self.first <= self.last
        low = jnp.where(some, self.first, jnp.iinfo(jnp.int32).max).reshape(len(some), -1, own)
        high = jnp.where(some, self.last, -1).reshape(len(some), -1, own)
        return jnp.min(low, axis=-1) // BLOCK, jnp.max(high, axis=-1) // BLOCK + 1

    def query_blocks(self, n: int, own: int) -> tuple[jax.Array, jax.Array]:
        """First query block that sees a key of each `own`, and the one after the last; [B, n]."""
        seen = seen_by_ranges(self.first, self.last, query_block=BLOCK, block=own, n_keys=n * own)
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
        """Whether queries see keys, by the places and the numbers of both, which broadcast."""
        first, last = queries
        return (key >= first) & (key <= last)


@struct.dataclass
class TreeMask:
    """The mask of rows whose segments share prefixes (kernels/visibility.py)."""

    until: Any  # int32 [B, T], of keys
    positions: Any  # int32 [B, T], of keys
    oldest: Any  # int32 [B, T], first position in the window of each query
    ahead: Any = None  # int32 [B, T], last place that each query sees; None: its own

    @classmethod
    def of(cls, segments, window, visibility: Visibility) -> "TreeMask":
        """The mask of whole rows, padded to blocks; padding sees itself."""
        B, T = segments.shape
        oldest = oldest_position(visibility.positions, window)
        # A softmax over no key is not finite.
        until = jnp.where(segments > 0, visibility.until, jnp.arange(T, dtype=jnp.int32))
        padding = jnp.arange(T, T + -T % BLOCK, dtype=jnp.int32)
        padding = jnp.broadcast_to(padding, (B, len(padding)))
        ahead = visibility.ahead
        return cls(
            ahead=None if ahead is None else jnp.concatenate([ahead, padding], axis=1),
            until=jnp.concatenate([until, padding], axis=1),
            positions=pad_axis(visibility.positions, 1, BLOCK),
            oldest=pad_axis(jnp.where(segments > 0, oldest, 0), 1, BLOCK),
        )

    def specs(self, of_queries: pl.BlockSpec, of_keys: pl.BlockSpec) -> "TreeMask":
        return TreeMask(of_keys, of_keys, of_queries, None if self.ahead is None else of_queries)

    def _seen(self, queries: int, keys: int):
        """bool [B, n, m]: which blocks of keys each block of queries visits, by their tokens."""
        B, T = self.until.shape
        places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        blocks = Queries(places, self.oldest, self.ahead)
        blocks = jax.tree.map(lambda a: a.reshape(-1, queries), blocks)
        return seen_blocks(blocks, Visibility(self.until, self.positions), block=keys)

    def key_blocks(self, own: int) -> tuple[jax.Array, jax.Array]:
        """The key blocks that each `own` queries visit [B, n, m], and their number [B, n]."""
        return visits(self._seen(own, BLOCK))

    def query_blocks(self, n: int, own: int) -> tuple[jax.Array, jax.Array]:
        """First query block of each `own` keys, and the one after the last to see them; [B, n]."""
        begin = own // BLOCK * jnp.arange(n, dtype=jnp.int32)
        seen = self._seen(BLOCK, own)
        if self.ahead is not None:
            begin = jnp.minimum(begin, jnp.argmax(seen, axis=1))
        after = jnp.arange(1, seen.shape[1] + 1, dtype=jnp.int32)
        last = jnp.max(jnp.where(seen, after[:, None], 0), axis=1)
        return jnp.broadcast_to(begin, last.shape), last

    @staticmethod
    def visits(key_blocks, b, i):
        """Bounds of the loop over the visits of a query block, and the key block of a visit."""
        visited, count = key_blocks
        return 0, count[b, i], lambda visit: visited[b, i, visit]

    def queries(self, at: Any = ...) -> tuple[jax.Array, ...]:
        return (self.oldest[at], *(() if self.ahead is None else (self.ahead[at],)))

    def keys(self, at: Any = ...) -> tuple[jax.Array, ...]:
        return self.until[at], self.positions[at]

    @staticmethod
    def visible(query, queries, key, keys):
        """Whether queries see keys, by the places and the numbers of both, which broadcast."""
        (oldest, *ahead), (until, positions) = queries, keys
        return sees(query, oldest, key, until, positions, *ahead)


TritonMask = RangeMask | TreeMask
