"""Tests of jaxrl/runtime/call_queue.py."""

import functools

import pytest

from jaxrl.runtime.call_queue import CallQueue


def run(limit: int, n_calls: int, events: list[str]) -> None:
    with CallQueue(limit) as calls:
        for i in range(n_calls):
            calls.make_room()
            events.append(f"call {i}")
            calls.add(functools.partial(events.append, f"read {i}"))


@pytest.mark.parametrize(
    ("limit", "want"),
    [
        (1, "call 0, read 0, call 1, read 1, call 2, read 2"),
        (2, "call 0, call 1, read 0, call 2, read 1, read 2"),
    ],
)
def test_a_call_waits_for_the_one_that_is_limit_calls_older(limit, want):
    events = []
    run(limit, 3, events)
    assert ", ".join(events) == want


def test_the_error_of_a_result_ends_the_block_without_further_reads():
    events = []

    def fail():
        raise FloatingPointError("call 0")

    with pytest.raises(FloatingPointError, match="call 0"), CallQueue() as calls:
        calls.add(fail)
        calls.add(functools.partial(events.append, "read 1"))
        calls.make_room()
    assert not events
