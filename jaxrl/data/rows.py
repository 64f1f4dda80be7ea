"""Rows of a packing: chains of sequences that share prefixes, and the rows that they are placed in.

Sequences with common tokens are placed next to each other in a row ("chain"). Each leaves out the
tokens that it has in common with the one before it: an earlier sequence of the chain has them in
the row. So a chain is a tree of tokens in depth-first order, and a token at position p attends to
the nearest token before it at each of the positions 0 to p. The tokens before a response's first
target may be left out, not the targets: every token of a response is in the row once, as without
sharing, and all losses read it there.

Placement: few micro-batches of declared shapes, balanced data-parallel ranks.


1. Bins. Items are placed in order of descending length, each in the first row with room (first-fit
   decreasing: with one row length at most 11/9 of the fewest rows). If no row has room, a new
   micro-batch opens: the smallest allowed row length T that holds the item, with the most rows that
   any shape of that length has. Then each micro-batch shrinks to the smallest shape that holds its
   items. The plan is computed with all row lengths allowed, then without the smallest, and so on.
   The best plan has the fewest tokens including padding, plus one eighth of the largest shape per
   micro-batch for its fixed cost. Ties go to the smaller attention area, the sum of T * T over
   rows.
2. Balance. The ranks wait for each other in every micro-batch, so its items are reassigned to its
   rows: in order of descending cost, each goes to the rank with the lowest cost so far that has a
   row with room (longest-processing-time rule). If the last items then find no room, whole rows of
   step 1 are assigned by the same rule instead, which always fits.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.data.image_places import between_images, content_tokens
from jaxrl.types import TrainingSample

RowShape = tuple[int, int]  # (rows per data-parallel rank, tokens of a row)


@dataclasses.dataclass(frozen=True)
class PrefixOrder:
    """Samples in an order in which those with common prefixes are next to each other."""

    items: np.ndarray  # int [n], index of each sample
    shared: np.ndarray  # int [n], tokens that it may leave out after the one before it


def sharing_order(samples: Sequence[TrainingSample], lens: np.ndarray, align: int) -> PrefixOrder:
    """The samples by prompt, and how many tokens each has in common with the one before it.

    An episode's samples stay together, the shortest prompt first: the prompts of the others contain
    its responses. `lens` are the lengths in a row; shared lengths are multiples of `align`.
    Placeholders are common if their images are, and no image is divided.
    """
    content = content_tokens(samples)
    firsts = [i for i, s in enumerate(samples) if i == 0 or s.branch == 0]
    episodes = [
        sorted(range(begin, end), key=lambda i: len(samples[i].prompt_tokens))
        for begin, end in zip(firsts, [*firsts[1:], len(samples)], strict=True)
    ]
    episodes.sort(key=lambda items: content[items[0]][0].astype(np.int32).tobytes())
    items = np.array([i for episode in episodes for i in episode])
    shared = np.zeros(len(items), int)
    for k in range(1, len(items)):
        before, (prompt, _) = content[items[k - 1]], content[items[k]]
        given = prompt[:-1][: max(lens[items[k]] - 1, 0)]
        inputs = np.concatenate(before)[:-1]
        shared[k] = between_images(samples[items[k]], _common_len(inputs, given), align)
    return PrefixOrder(items, shared)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Samples that are next to each other in a row."""

    items: np.ndarray  # int [n], index of each sample
    skipped: np.ndarray  # int [n], tokens that it leaves out; 0 for the first


def separate(n: int) -> list[Chain]:
    """Every sample as a chain."""
    return [Chain(np.array([i]), np.zeros(1, int)) for i in range(n)]


def chains(order: PrefixOrder, size: np.ndarray, limit: int) -> list[Chain]:
    """Chains of up to `limit` tokens, or of one sample.

    `size` [n] are the tokens of whole samples in a row, padding included.
    """
    begins, used = [], 0
    for k, (item, shared) in enumerate(zip(order.items, order.shared, strict=True)):
        used += size[item] - shared
        if not shared or used > limit:
            begins.append(k)
            used = size[item]
    skipped = order.shared.copy()
    skipped[begins] = 0
    parts = np.split(order.items, begins[1:]), np.split(skipped, begins[1:])
    return [Chain(items, left_out) for items, left_out in zip(*parts, strict=True)]


def chain_sums(
    placed: Sequence[Chain],
    whole: np.ndarray,
    cost: Callable[[np.ndarray], np.ndarray] = lambda n: n,
) -> np.ndarray:
    """Sum of cost(whole tokens) - cost(tokens left out) over the samples of each chain."""
    return np.array([(cost(whole[c.items]) - cost(c.skipped)).sum() for c in placed])


def visibility(
    lens: np.ndarray, skipped: np.ndarray, last: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(until, copies) of the tokens in the row of every sample of a chain.

    `until` is the last place of the row that sees the token, `copies` the number of samples that
    have it. `last` [n] is the place of each sample's last token.
    """
    until = [np.full(n - m, end, np.int32) for n, m, end in zip(lens, skipped, last, strict=True)]
    copies = [np.ones(len(u), np.int32) for u in until]
    for i, m in enumerate(skipped):
        depth = lens[i]
        for j in range(i + 1, len(lens)):
            depth = min(depth, skipped[j])
            if depth <= m:
                break
            until[i][: depth - m] = last[j]
            copies[i][: depth - m] += 1
    return until, copies


def _common_len(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


@dataclasses.dataclass
class Placement:
    """The shapes of the micro-batches, and the micro-batch and row of each item."""

    shape: list[RowShape]  # per micro-batch
    micro_of: np.ndarray  # int [n_items]
    row_of: np.ndarray  # int [n_items], row within the micro-batch, over all ranks

    def cost(self, shapes: Sequence[RowShape]) -> tuple[int, int]:
        """(tokens with padding and an overhead per micro-batch, attention area)."""
        overhead = max(rows * T for rows, T in shapes) // 8
        tokens = sum(rows * T for rows, T in self.shape)
        return tokens + overhead * len(self.shape), sum(rows * T * T for rows, T in self.shape)


def best_plan(size: np.ndarray, shapes: Sequence[RowShape], n_ranks: int) -> Placement:
    """The cheapest of the plans without the 0, 1, 2, ... shortest row lengths."""
    plans = []
    for shortest in sorted({T for _, T in shapes}):
        most_rows = {T: rows for rows, T in sorted(shapes) if shortest <= T}
        plans.append(_shrink(_first_fit(size, most_rows, n_ranks), size, shapes, n_ranks))
    return min(plans, key=lambda p: p.cost(shapes))


def _first_fit(size: np.ndarray, rows_of: dict[int, int], n_ranks: int) -> Placement:
    """First-fit decreasing. If no row fits, opens a micro-batch of the shortest rows that do."""
    free = np.zeros(0, size.dtype)
    shapes: list[RowShape] = []
    first_row: list[int] = []
    row_of = np.zeros(len(size), int)
    for item in np.argsort(-size, kind="stable"):
        fits = free >= size[item]
        row = int(fits.argmax()) if len(free) else 0
        if not len(free) or not fits[row]:
            T = min(row_len for row_len in rows_of if row_len >= size[item])
            row = len(free)
            shapes.append((rows_of[T], T))
            first_row.append(row)
            free = np.concatenate([free, np.full(n_ranks * rows_of[T], T, size.dtype)])
        free[row] -= size[item]
        row_of[item] = row
    micro_of = np.searchsorted(first_row, row_of, side="right") - 1
    return Placement(shapes, micro_of, row_of - np.array(first_row)[micro_of])


def _shrink(
    plan: Placement, size: np.ndarray, shapes: Sequence[RowShape], n_ranks: int
) -> Placement:
    """Shrinks each micro-batch to the smallest shape that holds its items."""
    by_size = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    for micro, (rows, T) in enumerate(plan.shape):
        items = np.flatnonzero(plan.micro_of == micro)
        used = size[items].sum()
        for shape in by_size:
            if shape[0] * shape[1] >= rows * T:
                break
            if used > n_ranks * shape[0] * shape[1] or size[items].max() > shape[1]:
                continue
            tight = _first_fit(size[items], {shape[1]: shape[0]}, n_ranks)
            if len(tight.shape) == 1:
                plan.shape[micro], plan.row_of[items] = shape, tight.row_of
                break
    return plan


def balance(
    plan: Placement, size: np.ndarray, cost: np.ndarray, n_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """(row within its micro-batch, start) of every item; rows are ordered by rank."""
    row, start = np.zeros(len(size), int), np.zeros(len(size), int)
    for micro, (rows, T) in enumerate(plan.shape):
        n_rows = n_ranks * rows
        items = np.flatnonzero(plan.micro_of == micro)
        items = items[np.lexsort((items, -size[items], -cost[items]))]
        local = _assign_items(items, size, cost, T, n_rows, n_ranks)
        if local is None:
            local = _assign_rows(plan.row_of[items], cost[items], n_rows, n_ranks)
        used = np.zeros(n_rows, int)
        for item, where in zip(items, local, strict=True):
            row[item], start[item] = where, used[where]
            used[where] += size[item]
    return row, start


def _assign_items(items, size, cost, T: int, n_rows: int, n_ranks: int) -> np.ndarray | None:
    """Assigns each item to the cheapest rank with room, there to the fullest row with room.

    Returns the row of each item, or None if an item finds no room.
    """
    free = np.full((n_ranks, n_rows // n_ranks), T)
    load = np.zeros(n_ranks)
    local = np.zeros(len(items), int)
    for i, item in enumerate(items):
        room = free >= size[item]
        open_ranks = room.any(axis=1)
        if not open_ranks.any():
            return None
        rank = int(np.where(open_ranks, load, np.inf).argmin())
        column = int(np.where(room[rank], free[rank], T + 1).argmin())
        free[rank, column] -= size[item]
        load[rank] += cost[item]
        local[i] = rank * free.shape[1] + column
    return local


def _assign_rows(row_of: np.ndarray, cost: np.ndarray, n_rows: int, n_ranks: int) -> np.ndarray:
    """Assigns each whole row to the cheapest rank that has a free row."""
    per_rank = n_rows // n_ranks
    row_cost = np.bincount(row_of, weights=cost, minlength=n_rows)
    load, used, new_row = np.zeros(n_ranks), np.zeros(n_ranks, int), np.zeros(n_rows, int)
    for row in np.argsort(-row_cost, kind="stable"):
        rank = int(np.where(used < per_rank, load, np.inf).argmin())
        new_row[row] = rank * per_rank + used[rank]
        used[rank] += 1
        load[rank] += row_cost[row]
    return new_row[row_of]
