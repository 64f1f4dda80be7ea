"""Tests of jaxrl/rewards/sandbox/plain_data.py."""

import collections
import enum
import json
import math

import hypothesis
import pytest
from hypothesis import strategies

from jaxrl.rewards.sandbox.plain_data import decode, encode


def refuse(value):
    raise TypeError(f"not plain: {value!r}")


def crossed(value):
    return decode(json.loads(json.dumps(encode(value, refuse))), refuse)


scalars = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats(allow_nan=False)
    | strategies.complex_numbers(allow_nan=False)
    | strategies.text()
    | strategies.binary()
)
hashable = strategies.deferred(
    lambda: (
        scalars
        | strategies.lists(hashable, max_size=2).map(tuple)
        | strategies.frozensets(hashable, max_size=2)
    )
)
values = strategies.deferred(
    lambda: (
        hashable
        | strategies.lists(values, max_size=3)
        | strategies.dictionaries(hashable, values, max_size=2)
        | strategies.sets(hashable, max_size=3)
    )
)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(values)
def test_plain_data_crosses_unchanged(value):
    assert repr(crossed(value)) == repr(value) or crossed(value) == value


def test_special_numbers_cross():
    assert repr(crossed(math.nan)) == "nan" and crossed([math.inf, -0.0]) == [math.inf, 0.0]
    assert crossed(10**10000) == 10**10000
    assert crossed(range(2, 9, 3)) == range(2, 9, 3)


class Forged(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


def test_a_subclass_arrives_as_its_base():
    point = collections.namedtuple("point", "x y")
    for value, base in [
        (Forged("a"), "a"),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
        (point(1, 2), (1, 2)),
        (enum.IntEnum("Color", "RED").RED, 1),
    ]:
        found = crossed(value)
        assert type(found) is type(base) and found == base


def test_an_object_is_left_to_the_caller():
    assert encode([object()], lambda value: {"object": 3}) == [{"object": 3}]
    assert decode([{"object": 3}], lambda data: data["object"]) == [3]


@pytest.mark.parametrize(
    "data", [{"bytes": "xy"}, {"int": "zz"}, {"dict": [1]}, {"set": [[]]}, {"range": [0, 1, 0]}]
)
def test_data_that_encode_does_not_make_is_an_error(data):
    with pytest.raises((ValueError, TypeError)):
        decode(data, refuse)
