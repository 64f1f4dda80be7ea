"""Simulated schedules against cases computed by hand (jaxrl/planner/schedules/simulation.py)."""

import dataclasses

import numpy as np
import pytest

from jaxrl.planner.schedules.replica import ReplicaUsage
from jaxrl.planner.schedules.simulation import (
    Costs,
    Outcome,
    SimulatedEngines,
    SimulatedSchedule,
    simulate,
)

STEP = Costs(  # a decode step takes 1 s, however many sequences it has
    decode=(ReplicaUsage(fixed_s=1.0),),
    prefill_s=0.0,
    train_s=0.0,
    train_pair_s=0.0,
    update_s=0.0,
    transfer_s=0.0,
)


def run(
    costs: Costs, schedule: SimulatedSchedule, lengths, replicas=1, slots=8, **changes
) -> Outcome:
    settings = dict(prompt_len=1, groups_per_step=len(lengths)) | changes
    return simulate(
        costs, SimulatedEngines(replicas, slots), schedule, np.array(lengths), **settings
    )


def test_sync_generates_the_longest_response_and_then_trains():
    costs = dataclasses.replace(STEP, train_s=0.5)
    found = run(costs, SimulatedSchedule("sync"), [[2], [4]])
    # 4 decode steps; (1 + 2) + (1 + 4) tokens at 0.5 s
    assert found.step_s == 4 + 4
    assert found.tokens_per_s == 6 / 8
    assert (found.staleness_max, found.versions_per_response) == (0, 1)
    # (3^2 + 5^2) / 2 pairs of a query and a key
    pairs = dataclasses.replace(STEP, train_pair_s=0.5)
    assert run(pairs, SimulatedSchedule("sync"), [[2], [4]]).step_s == 4 + 8.5
    # A replica each: one has nothing to decode for 2 of the 2 x 8 s.
    assert (
        run(costs, SimulatedSchedule("sync"), [[2], [4]], replicas=2, slots=1).rollout_idle
        == 2 / 16
    )


def test_responses_wait_for_free_slots():
    # One slot: 2 + 4 decode steps. Two slots: 2 | 3, then 4 in the slot that was free first.
    assert run(STEP, SimulatedSchedule("sync"), [[2], [4]], slots=1).step_s == 6
    assert run(STEP, SimulatedSchedule("sync"), [[2], [3], [4]], slots=2).step_s == 2 + 4


def test_a_decode_step_takes_the_time_of_its_slowest_resource():
    # prompt 2, response 3: the steps attend to 2, 3 and 4 keys
    keys = dataclasses.replace(STEP, decode=(ReplicaUsage(per_key_s=1.0),))
    assert run(keys, SimulatedSchedule("sync"), [[3]], prompt_len=2).step_s == 2 + 3 + 4
    # two sequences: 2 s of weights against 2 x 0.5 s of compute, then 2 x 3 s
    for per_sequence_s, seconds in ((0.5, 2.0), (3.0, 6.0)):
        both = (ReplicaUsage(fixed_s=2.0), ReplicaUsage(per_sequence_s=per_sequence_s))
        costs = dataclasses.replace(STEP, decode=both)
        assert run(costs, SimulatedSchedule("sync"), [[1, 1]]).step_s == seconds


def test_a_prompt_is_prefilled_once_per_replica():
    costs = dataclasses.replace(STEP, prefill_s=0.5, transfer_s=0.25)
    # 4 prompt tokens at 0.5 s, 3 steps, and the new weights
    assert run(costs, SimulatedSchedule("sync"), [[3, 3]], prompt_len=4).step_s == 2 + 3 + 0.25
    # on two replicas of one slot, at the same time
    found = run(costs, SimulatedSchedule("sync"), [[3, 3]], prompt_len=4, replicas=2, slots=1)
    assert found.step_s == 2 + 3 + 0.25


@pytest.mark.parametrize(
    ("staleness", "step_s", "trainer_idle", "rollout_idle", "mean"),
    [
        (0, 7.0, 4 / 7, 3 / 7, 0.0),  # 4 s of rollout, then 3 s of training
        # The next response is decoded while the trainer works: 4 s a step, 3 of them training.
        (1, 4.0, 1 / 4, 0.0, 1.0),
    ],
)
def test_async_overlaps_training_with_the_next_rollout(
    staleness, step_s, trainer_idle, rollout_idle, mean
):
    costs = dataclasses.replace(STEP, update_s=3.0)
    found = run(costs, SimulatedSchedule("async", staleness), [[4]], slots=1)
    assert found.step_s == step_s and found.staleness_mean == found.staleness_max == mean
    assert found.trainer_idle == pytest.approx(trainer_idle)
    assert found.rollout_idle == pytest.approx(rollout_idle)


def test_a_trainer_that_is_slower_bounds_async():
    costs = dataclasses.replace(STEP, update_s=5.0)
    found = run(costs, SimulatedSchedule("async", 1), [[4]], slots=1)
    # 5 s of training a step; the replica waits 1 s until the version allows the next group
    assert (found.step_s, found.trainer_idle) == (5.0, 0.0)
    assert found.rollout_idle == pytest.approx(1 / 5)


def test_async_with_one_step_of_staleness_drains_every_batch_to_its_longest_response():
    """Lengths 2 and 6 in every batch; an update takes 3 s, during which the next batch runs."""
    costs = dataclasses.replace(STEP, update_s=3.0)
    found = run(costs, SimulatedSchedule("async", 1), [[2], [6]])
    assert found.step_s == 6 and found.trainer_idle == 3 / 6
    assert found.versions_per_response == 1 and found.staleness_mean == found.staleness_max == 1


def test_async_with_two_steps_of_staleness_has_two_batches_in_flight():
    """Lengths 2 and 6 in every batch, of which two run at the same time.

    Batches 0 and 1 start at 0 s and end at 6 s. The order of batch 2 comes after step 0, at 9 s:
    batches 2 and 3 start and end at 15 s. Step 1 was from 9 to 12 s, step 2 is from 15 to 18 s,
    then comes the order of batch 4, at 18 s. So two steps take 9 s, of which 3 s without an order.
    Batches 2 and 3 have version 1: they are one and two steps old when they are trained on.
    """
    costs = dataclasses.replace(STEP, update_s=3.0)
    found = run(costs, SimulatedSchedule("async", 2), [[2], [6]], n_steps=8, n_warmup=2)
    assert found.step_s == 9 / 2 and found.rollout_idle == pytest.approx(3 / 9)
    assert found.trainer_idle == pytest.approx(1 - 6 / 9)
    assert (found.staleness_mean, found.staleness_max) == (1.5, 2)
    assert found.versions_per_response == 1


def test_a_response_of_a_later_batch_continues_under_new_weights():
    """Lengths 4, 6, 8, 4, ..., a group per step, two in flight; updates take no time.

    Order n has version n - 1. At 12 s, groups 4 (6) and 5 (8) start with version 3. Batch 4 ends at
    18 s, batch 5 at 20 s with version 4, batch 6 at 22 s with 5, batch 7 at 26 s with 6, batch 8 at
    30 s with 7; group 9 is complete then, and groups 10 (6) and 11 (8) start as 4 and 5 did.
    Groups 5, 6, 7 and 8 continue under the weights of the next order; all but group 4 are two
    steps old.
    """
    found = run(
        STEP,
        SimulatedSchedule("async", 2),
        [[4], [6], [8]],
        groups_per_step=1,
        n_steps=10,
        n_warmup=4,
    )
    assert found.step_s == (30 - 12) / 6
    assert found.versions_per_response == pytest.approx((4 * 2 + 2) / 6)
    assert found.staleness_mean == pytest.approx((5 * 2 + 1) / 6) and found.staleness_max == 2


def test_partial_in_prompt_order_waits_for_the_next_group():
    """Lengths 2, 6, 2, 6, ..., a group per step, two in flight; an update takes 1 s.

    Groups 3 (6) and 4 (2) run together for 6 s, then both are trained on, one step after the other.
    Group 5 starts when group 4 is already complete, so it samples its first token after that step.
    """
    costs = dataclasses.replace(STEP, update_s=1.0)
    settings = dict(lengths=[[2], [6]], slots=2, groups_per_step=1, n_steps=8, n_warmup=2)
    found = run(costs, SimulatedSchedule("partial", max_staleness=1), **settings)
    assert found.step_s == (6 + 2 * 1) / 2
    assert found.staleness_mean == 0.5 and found.versions_per_response == 1


def test_partial_by_arrival_trains_on_the_complete_groups_and_resumes_the_others():
    """Lengths 2, 6, 2, 6, ..., a group per step, at most two in flight; an update takes 1 s.

    Say group 3 (6) starts after update 2, when group 2 (2) is complete. Update 3 trains on group 2,
    which takes until 1 s later. Group 4 (2) starts then. Group 3 was started two versions before
    update 4 + 1, so update 4 waits for its 6 steps and trains on it; group 4 is complete by then.
    So two updates take 6 s of decoding and 2 s of training.
    """
    costs = dataclasses.replace(STEP, update_s=1.0)
    settings = dict(lengths=[[2], [6]], slots=2, groups_per_step=1)
    even = dict(n_steps=8, n_warmup=2)
    found = run(costs, SimulatedSchedule("partial", 1, order="arrival"), **settings, **even)
    assert run(costs, SimulatedSchedule("sync"), **settings, **even).step_s == (2 + 6) / 2 + 1
    assert found.step_s == (6 + 2 * 1) / 2
    assert found.staleness_max == 1 and found.versions_per_response == 1


def test_kv_of_unfinished_responses_is_computed_again_unless_kept():
    costs = dataclasses.replace(STEP, update_s=1.0, prefill_s=0.01)
    again, kept = (
        run(
            costs,
            SimulatedSchedule("partial", 1, oversample=2, keep_kv=keep_kv),
            [[2], [6]],
            slots=2,
            groups_per_step=1,
        )
        for keep_kv in (False, True)
    )
    assert kept.step_s < again.step_s


@pytest.mark.parametrize("mode", ["partial", "async"])
@pytest.mark.parametrize("order", ["prompt", "arrival"])
def test_staleness_never_exceeds_the_limit_and_zero_is_sync(mode, order):
    rng = np.random.default_rng(0)
    costs = dataclasses.replace(
        STEP,
        decode=(ReplicaUsage(0.1, 0.01, 1e-4),),
        prefill_s=1e-3,
        train_s=1e-2,
        update_s=0.1,
        transfer_s=0.1,
    )
    lengths = np.clip(rng.lognormal(3, 1, (40, 2)), 1, 200).astype(int)
    for staleness in range(4):
        schedule = SimulatedSchedule(mode, staleness, oversample=3, order=order)
        found = run(costs, schedule, lengths, replicas=2, slots=5, groups_per_step=4)
        assert found.staleness_max <= staleness
        assert 0 <= found.rollout_idle < 1 and 0 <= found.trainer_idle < 1
    sync = run(costs, SimulatedSchedule("sync"), lengths, replicas=2, slots=5, groups_per_step=4)
    zero = run(costs, SimulatedSchedule(mode, 0, order=order), lengths, replicas=2, slots=5,
               groups_per_step=4)  # fmt: skip
    assert zero.step_s == pytest.approx(sync.step_s)
