"""The units of 1F1B with chunks: every unit once, after what it needs, and idle time by hand."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.pipeline_chunks import rounds
from jaxrl.models.pipeline_schedule import Schedule

SIZES = [(4, 1, 3), (2, 2, 4), (4, 2, 8), (3, 3, 3)]  # S, V, M


@functools.cache
def table(schedule: Schedule):
    """[S, ticks] of the forward and of the backward units, and [ticks] of `n_returned`."""
    ticks = jnp.arange(schedule.n_ticks + schedule.period)

    @jax.jit
    def units(stages):
        both = (schedule.forward(stages, ticks), schedule.backward(stages, ticks))
        return *both, schedule.n_returned(ticks)

    return jax.device_get(units(jnp.arange(schedule.n_stages)[:, None]))


def ticks_of(unit) -> dict[tuple[int, int, int], int]:
    """(stage, chunk of the stage, micro-batch) -> its tick."""
    found = collections.defaultdict(list)
    for stage, tick in np.argwhere(unit.busy):
        found[stage, unit.chunk[stage, tick], unit.micro_batch[stage, tick]].append(tick)
    assert all(len(ticks) == 1 for ticks in found.values())
    return {key: ticks[0] for key, ticks in found.items()}


@pytest.mark.parametrize(("n_stages", "n_chunks", "n_micro"), SIZES)
def test_a_unit_runs_one_tick_after_the_unit_that_sends_its_input(n_stages, n_chunks, n_micro):
    forward, backward = map(ticks_of, table(Schedule(n_stages, n_chunks, n_micro))[:2])
    assert len(forward) == len(backward) == n_stages * n_chunks * n_micro
    for (stage, chunk, m), tick in forward.items():
        layer_chunk = chunk * n_stages + stage
        done = backward[stage, chunk, m]
        if layer_chunk < n_stages * n_chunks - 1:
            after = (layer_chunk + 1) % n_stages, (layer_chunk + 1) // n_stages, m
            assert (forward[after], backward[after]) == (tick + 1, done - 1)
        else:
            assert done == tick  # the loss is between them


@pytest.mark.parametrize(("n_stages", "n_chunks", "n_micro"), SIZES)
def test_no_slot_is_written_while_its_unit_waits(n_stages, n_chunks, n_micro):
    schedule = Schedule(n_stages, n_chunks, n_micro)
    forward, backward, _ = table(schedule)
    assert forward.slot.max() < n_chunks * n_stages + n_stages - 1
    written = forward.chunk * n_micro + forward.micro_batch
    wanted = backward.chunk * n_micro + backward.micro_batch
    for stage in range(n_stages):
        slots = {}
        for tick in range(schedule.n_ticks + schedule.period):
            if tick < schedule.n_ticks:
                slots[forward.slot[stage, tick]] = written[stage, tick]
            if backward.busy[stage, tick]:
                assert slots[backward.slot[stage, tick]] == wanted[stage, tick]


def test_idle_ticks_and_saved_units_are_those_of_a_hand_count():
    """4 stages of 2 chunks and 8 rows: 16 units each way, in 19 ticks. A chunk is half a stage.

    So a stage is idle in 3 of 19 ticks, the time of 1.5 rows; with one chunk in 3 of 11.
    """
    one, two = Schedule(4, 1, 8), Schedule(4, 2, 8)
    assert (one.n_ticks, two.n_ticks) == (11, 19)
    for schedule in (one, two):
        for unit in table(schedule)[:2]:
            assert (schedule.n_ticks - unit.busy.sum(axis=1)).tolist() == [3] * 4
    # 7 rows in a stage, and 11 in half a stage
    assert (one.n_saved, two.n_saved) == (7, 11)
    # the losses are in ticks 7 to 10, then from 15 on: 4 of every 8
    last = table(two)[0]
    losses = np.flatnonzero(last.busy[3] & (last.chunk[3] == 1))
    assert losses.tolist() == [7, 8, 9, 10, 15, 16, 17, 18]


@pytest.mark.parametrize(("n_stages", "n_chunks", "n_micro"), SIZES)
def test_micro_batches_return_in_order(n_stages, n_chunks, n_micro):
    schedule = Schedule(n_stages, n_chunks, n_micro)
    _, backward, n_returned = table(schedule)
    done, ticks = ticks_of(backward), np.arange(len(n_returned))
    expected = sum(ticks > done[0, 0, m] for m in range(n_micro))
    np.testing.assert_array_equal(n_returned, expected)


@pytest.mark.parametrize(("n_stages", "n_chunks"), [(2, 2), (2, 3), (4, 2), (4, 6), (6, 4), (3, 3)])
def test_every_chunk_moves_once_and_every_stage_sends_one_per_round(n_stages, n_chunks):
    places = set()
    for moves in rounds(n_stages, n_chunks):
        assert {move.source for move in moves} == set(range(n_stages))
        assert {move.target for move in moves} == set(range(n_stages))
        for move in moves:
            chunk = move.source * n_chunks + move.source_index
            assert (move.target, move.target_index) == (chunk % n_stages, chunk // n_stages)
            places.add(chunk)
    assert len(places) == math.prod((n_stages, n_chunks))
