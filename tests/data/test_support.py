"""Tests of jaxrl/data/support.py against numpy's own bit packing."""

import numpy as np

from jaxrl.data.support import (
    from_bits,
    join,
    join_packed,
    pack_sets,
    to_bits,
    unrestricted,
)
from jaxrl.types import TokenSets

V = 70  # no multiple of a word


def random_members(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((n, V)) < rng.choice([0.0, 0.02, 0.5, 1.0], size=(n, 1))


def packed(members):
    padded = np.pad(members, ((0, 0), (0, -V % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def lists(sets: TokenSets) -> list[list[int]]:
    return [part.tolist() for part in np.split(sets.ids, np.cumsum(sets.counts))[:-1]]


def test_bits_become_the_ids_that_are_set():
    members = random_members(50)
    want = [np.flatnonzero(row).tolist() for row in members]
    assert lists(from_bits(packed(members))) == want
    assert [] in want and list(range(V)) in want


def test_joined_parts_are_truncated_after_whole_positions():
    parts = [from_bits(packed(random_members(4, seed))) for seed in range(3)]
    parts.insert(1, unrestricted(2))
    every = [ids for part in parts for ids in lists(part)]
    for n in (0, 5, 14):
        assert lists(join(parts, n)) == every[:n]
    assert lists(join([], 0)) == []


def test_packed_supports_become_the_bits_of_their_tokens_and_all_bits_elsewhere():
    members = random_members(9)
    sets = from_bits(packed(members))
    first, second = join([sets], 4), TokenSets(sets.counts[4:], sets.ids[sets.counts[:4].sum() :])
    one = pack_sets([(first, 3), (None, 8), (unrestricted(2), 12)])  # row 0, columns 3 to 6
    two = pack_sets([(second, 9)])  # row 1, columns 1 to 5
    want = np.full((4, 8, 3), 0xFFFFFFFF, np.uint32)
    bits = packed(members)
    bits[~members.any(axis=1)] = 0xFFFFFFFF  # an empty set is no restriction
    want[0, 3:7], want[3, 1:6] = bits[:4], bits[4:]
    joined = join_packed([one, two], size=16)
    np.testing.assert_array_equal(to_bits(joined, (4, 8), V), want)
    alone = to_bits(join_packed([one, None], size=16), (4, 8), V)
    np.testing.assert_array_equal(alone[:2], want[:2])
    assert pack_sets([(unrestricted(3), 0), (None, 5)]) is None
    assert join_packed([None, None], size=16) is None
