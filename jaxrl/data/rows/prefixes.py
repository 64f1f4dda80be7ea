"""Sequences that share prefixes: which ones, and which tokens of a row see which.

Sequences with common tokens are placed next to each other in a row ("chain"). Each leaves out the
tokens that it has in common with the one before it: an earlier sequence of the chain has them in
the row. So a chain is a tree of tokens in depth-first order, and a token at position p attends to
the nearest token before it at each of the positions 0 to p. The tokens before a response's first
target may be left out, not the targets: every token of a response is in the row once, as without
sharing, and all losses read it there.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.types import TrainingSample


@dataclasses.dataclass(frozen=True)
class PrefixOrder:
    """Samples in an order in which those with common prefixes are next to each other."""

    items: np.ndarray  # int [n], index of each sample
    shared: np.ndarray  # int [n], tokens that it may leave out after the one before it


def sharing_order(samples: Sequence[TrainingSample], lens: np.ndarray, align: int) -> PrefixOrder:
    """The samples by prompt, and how many tokens each has in common with the one before it.

    An episode's samples stay together, the shortest prompt first: the prompts of the others contain
    its responses. `lens` are the lengths in a row; shared lengths are multiples of `align`.
    """
    firsts = [i for i, s in enumerate(samples) if i == 0 or s.branch == 0]
    episodes = [
        sorted(range(begin, end), key=lambda i: len(samples[i].prompt_tokens))
        for begin, end in zip(firsts, [*firsts[1:], len(samples)], strict=True)
    ]
    episodes.sort(key=lambda items: samples[items[0]].prompt_tokens.astype(np.int32).tobytes())
    items = np.array([i for episode in episodes for i in episode])
    shared = np.zeros(len(items), int)
    for k in range(1, len(items)):
        before, own = samples[items[k - 1]], samples[items[k]]
        given = own.prompt_tokens[:-1][: max(lens[items[k]] - 1, 0)]
        inputs = np.concatenate([before.prompt_tokens, before.tokens])[:-1]
        shared[k] = _common_len(inputs, given) // align * align
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
