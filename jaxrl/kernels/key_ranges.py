"""The keys that a query sees as ranges of places: one in separate segments, several in a tree.

A row whose segments share prefixes is a tree of tokens in depth-first order (visibility.py). A run
is a sequence of places of which each sees the one before it, as the first branch after a prefix
does. A query sees the beginning of one run per level of its path in the tree: at level 0 that of a
run without a parent, at the last level that of the run it belongs to, up to itself. Samples of a
prompt have two levels. Kernels with one range per query attend once per level; the means are
combined.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxrl.kernels.visibility import Visibility, oldest_position, padded_range

State = TypeVar("State")


@struct.dataclass
class KeyTree:
    """State from which the ranges of the next level are computed."""

    until: Any  # int32 [B, T], last place that sees the token; -1 at padding
    shift: Any  # int32 [B, T], place - position; never decreases along the tokens of a row
    oldest: Any  # int32 [B, T], first position in the window of each query
    deep: Any  # bool [B, T], queries whose path has the next level
    begin: Any  # int32 [B, T], first place of the run of that level
    offset: Any  # int32 [B, T], place - position in that run
    ahead: Any  # int32 [B, T], last place that each query sees in its own run; None: its own


@struct.dataclass
class KeyRanges:
    """The range of keys that each query sees at one level of the tree."""

    first: Any  # int32 [B, T]
    last: Any  # int32 [B, T]; no key if smaller than `first`
    tree: KeyTree | None  # None: there is one level

    @classmethod
    def of(
        cls,
        segments: Int[Array, "B T"],
        window: int | Int[Array, ""],
        visibility: Visibility | None,
        *,
        multiple: int = 1,
    ) -> "KeyRanges":
        """Level 0 of rows padded to a multiple of a block; padding sees padding.

        The positions of a sequence begin with 0, or the row shares no prefixes.
        """
        if visibility is None:
            return cls(*padded_range(segments, window, multiple), tree=None)
        widths = ((0, 0), (0, -segments.shape[1] % multiple))
        live = jnp.pad(segments > 0, widths)
        positions = jnp.pad(visibility.positions, widths)
        until = jnp.where(live, jnp.pad(visibility.until, widths), -1)
        oldest, here = oldest_position(positions, window), _places(until)
        ahead = None if visibility.ahead is None else jnp.pad(visibility.ahead, widths)
        begin, offset = _runs(live, until, here - positions)
        tree = KeyTree(until, here - positions, oldest, live, begin, offset, ahead)
        ranges = cls(here, here, tree).next_level()
        padded = (jnp.where(live, a, here) for a in (ranges.first, ranges.last))
        return cls(*padded, tree=ranges.tree)

    def next_level(self) -> "KeyRanges":
        """The ranges of the next level; empty for queries whose path does not have it."""
        assert self.tree is not None
        tree, here = self.tree, _places(self.first)
        deep = tree.deep & (tree.shift > tree.offset)
        begin, offset = _runs(deep, tree.until, tree.shift)
        # The run of the level below begins with the position after the last one that it sees here.
        own = here if tree.ahead is None else tree.ahead
        last = jnp.where(deep, begin - offset + tree.offset - 1, own)
        first = jnp.maximum(tree.begin, tree.oldest + tree.offset)
        last = jnp.where(tree.deep, last, first - 1)
        tree = KeyTree(tree.until, tree.shift, tree.oldest, deep, begin, offset, tree.ahead)
        return KeyRanges(first, last, tree)

    def fold(self, add: Callable[["KeyRanges", State], State], state: State) -> State:
        """`state` after `add(ranges, state)` for every level below this one."""
        if self.tree is None:
            return state

        def has_next(carry) -> jax.Array:
            return jnp.any(carry[0].tree.deep)

        def step(carry):
            ranges, state = carry
            ranges = ranges.next_level()
            return ranges, add(ranges, state)

        with jax.named_scope("further_ranges"):
            return lax.while_loop(has_next, step, (self, state))[1]


def seen_by_ranges(
    first: Int[Array, "*B T"],
    last: Int[Array, "*B T"],
    *,
    block: int,
    n_keys: int,
    query_block: int | None = None,
) -> Bool[Array, "*B n m"]:
    """Whether a query of each block sees a key of each of the blocks of `n_keys` keys.

    Blocks have `block` tokens; those of queries `query_block`, if given.
    """
    first, last = (a.reshape(*a.shape[:-1], -1, query_block or block, 1) for a in (first, last))
    j = jnp.arange(n_keys // block, dtype=jnp.int32)
    return jnp.any((first // block <= j) & (j <= last // block) & (first <= last), axis=-2)


def _places(rows: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 1)


def _runs(deep, until, shift) -> tuple[jax.Array, jax.Array]:
    """(first place, place - position) of the runs of a level, at each of its `deep` queries.

    `deep` tokens are those of this level and of the levels below it. One that sees none before it
    begins a run of this level.
    """
    here, time = _places(until), until.ndim - 1
    reach = lax.cummax(jnp.where(deep, until, -1), axis=time)
    before = jnp.where(here > 0, jnp.roll(reach, 1, axis=time), -1)
    begins = deep & (before < here)
    begin, offset = (lax.cummax(jnp.where(begins, a, -1), axis=time) for a in (here, shift))
    return begin, offset
