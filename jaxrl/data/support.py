"""Supports of sampling distributions: the token ids that top_k, top_p and min_p kept.

An engine returns one bit per token of the vocabulary. The host keeps ids, which are few under the
usual filters, and turns one micro-batch at a time into bits again. No ids mean no restriction: the
support of a token that was sampled has at least that token.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32

from jaxrl.types import TokenSets

WORD = 32  # bits


@dataclasses.dataclass(frozen=True)
class PackedSets:
    """The supports of a micro-batch [B, T], without the unrestricted ones."""

    index: np.ndarray  # int64 [n], b * T + t of each id
    ids: np.ndarray  # int32 [n]


def n_words(n_vocab: int) -> int:
    """Words of a bitset over the vocabulary."""
    return -(-n_vocab // WORD)


def unrestricted(n: int) -> TokenSets:
    """`n` positions without a filter."""
    return TokenSets(np.zeros(n, np.int64), np.zeros(0, np.int32))


def from_bits(bits: UInt32[np.ndarray, "n W"]) -> TokenSets:
    """The ids of the bits that are set: bit i of word w is the id 32 w + i."""
    rows, words = np.nonzero(bits)  # most words of a set are 0
    at, bit = np.nonzero((bits[rows, words][:, None] >> np.arange(WORD, dtype=np.uint32)) & 1)
    ids = words[at] * WORD + bit
    return TokenSets(np.bincount(rows[at], minlength=len(bits)), ids.astype(np.int32))


def join(parts: Sequence[TokenSets], n: int) -> TokenSets:
    """The first `n` positions of the parts in order."""
    counts = np.concatenate([part.counts for part in parts] or [np.zeros(0, np.int64)])[:n]
    ids = np.concatenate([part.ids for part in parts] or [np.zeros(0, np.int32)])
    return TokenSets(counts, ids[: counts.sum()])


def pack_sets(located: Sequence[tuple[TokenSets | None, int]]) -> PackedSets | None:
    """The supports of responses whose first token is at the given index of a flat micro-batch.

    None if all are unrestricted.
    """
    restricted = [(sets, start) for sets, start in located if sets is not None and len(sets.ids)]
    if not restricted:
        return None
    index = [start + np.repeat(np.arange(len(s.counts)), s.counts) for s, start in restricted]
    return PackedSets(np.concatenate(index), np.concatenate([s.ids for s, _ in restricted]))


def join_packed(parts: Sequence[PackedSets | None], size: int) -> PackedSets | None:
    """The supports of micro-batches of `size` tokens each, concatenated by rows."""
    found = [(i, part) for i, part in enumerate(parts) if part is not None]
    if not found:
        return None
    index = np.concatenate([part.index + i * size for i, part in found])
    return PackedSets(index, np.concatenate([part.ids for _, part in found]))


def to_bits(
    packed: PackedSets | None, shape: tuple[int, int], n_vocab: int
) -> UInt32[np.ndarray, "B T W"]:
    """Bitsets of a micro-batch; unrestricted tokens have all bits."""
    bits = np.zeros((shape[0] * shape[1], n_words(n_vocab)), np.uint32)
    if packed is not None:
        word, bit = np.divmod(packed.ids, WORD)
        np.bitwise_or.at(bits, (packed.index, word), np.uint32(1) << bit.astype(np.uint32))
    bits[~bits.any(axis=1)] = np.uint32(0xFFFFFFFF)
    return bits.reshape(*shape, -1)
