"""Simulated schedules against cases computed by hand, and an engine against a measured run."""

import dataclasses
import importlib
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxrl.config.keys import RolloutConfig, ScheduleConfig
from jaxrl.engine.device.batches import dispatch_shapes
from jaxrl.planner.schedules.engine import EngineCosts, ReplicaUsage, SimulatedEngine
from jaxrl.planner.schedules.search import SYNC
from jaxrl.planner.schedules.simulation import Outcome, TrainingCosts, simulate
from tests.planner.tiny_run import TINY

ONE_SECOND = (ReplicaUsage(fixed_s=1.0),)  # a decode step, however many sequences it has


def schedule(mode: str, max_staleness: int = 0, **changes) -> ScheduleConfig:
    return ScheduleConfig(mode=mode, max_staleness=max_staleness, **changes)


def new_engine(
    decode=ONE_SECOND, prefill_s=0.0, *, replicas=1, prompt_len=1, longest=200, unit=1, **rollout
) -> SimulatedEngine:
    cfg = RolloutConfig(**dict(max_num_seqs=8, page_len=1, steps_per_dispatch=1) | rollout)
    shapes = dispatch_shapes(cfg, prompt_len + longest, TINY)
    return SimulatedEngine(
        EngineCosts(decode, prefill_s),
        cfg,
        shapes,
        n_replicas=replicas,
        n_pages=cfg.max_num_seqs * shapes.max_pages_per_seq,
        prompt_len=prompt_len,
        response_len=longest,
        unit=unit,
    )


def run(
    lengths,
    how: ScheduleConfig = SYNC,
    *,
    slots=8,
    prompt_len=1,
    groups_per_step=None,
    n_steps=7,
    n_warmup=3,
    training=None,
    **engine,
) -> Outcome:
    costs = dataclasses.replace(TrainingCosts(0.0, 0.0, 0.0, 0.0), **training or {})
    return simulate(
        costs,
        new_engine(prompt_len=prompt_len, max_num_seqs=slots, **engine),
        how,
        np.array(lengths),
        prompt_len=prompt_len,
        groups_per_step=groups_per_step or len(lengths),
        n_steps=n_steps,
        n_warmup=n_warmup,
    )


def test_the_engine_makes_the_steps_of_a_measured_run(monkeypatch):
    """`python scripts/bench_schedule.py` in docs/LOG.md: steps of decode, tokens of prefill."""
    monkeypatch.setattr("sys.argv", ["bench_schedule"])
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[3] / "scripts"))
    bench_schedule = importlib.import_module("bench_schedule")
    args = bench_schedule.parse_args()
    lens = bench_schedule.lengths(
        np.random.default_rng(args.seed),
        (args.steps, args.prompts, args.samples),
        mean=args.mean_len,
        longest=round(args.longest * args.mean_len),
        sigma=args.sigma,
    )
    found = []
    for max_staleness in (0, 1):
        engine: Any = new_engine(
            prompt_len=args.prompt_len,
            longest=int(lens.max()),
            max_num_seqs=32,
            max_num_batched_tokens=512,
            page_len=64,
            steps_per_dispatch=args.steps_per_dispatch,
        )
        engine.cfg = TINY
        values = bench_schedule.run(engine, None, lens, args, max_staleness=max_staleness)
        found.append([values[name] for name in ("decode_steps", "prefill_tokens")])
        assert values["staleness_mean"] == pytest.approx(0.83 * max_staleness, abs=0.005)
    assert found == [[3810, 2256], [2058, 4796]]


def test_units_of_tokens_change_the_time_little():
    """Responses of about 300 tokens on two replicas, of which each has pages for two."""
    lengths = np.random.default_rng(0).integers(60, 540, (4, 2))
    decode = (ReplicaUsage(0.01, 1e-3, 1e-6),)
    shape = dict(replicas=2, slots=2, longest=540, prompt_len=31, decode=decode, prefill_s=1e-4)
    exact, coarse = (
        run(lengths, page_len=10, steps_per_dispatch=8, unit=unit, n_steps=2, n_warmup=1, **shape)
        for unit in (1, 15)
    )
    assert coarse.step_s == pytest.approx(exact.step_s, rel=0.03)
    assert coarse.rollout_idle == pytest.approx(exact.rollout_idle, abs=0.03)


def test_sync_generates_the_longest_response_and_then_trains():
    # 4 decode steps; (1 + 2) + (1 + 4) tokens at 0.5 s
    found = run([[2], [4]], training=dict(token_s=0.5))
    assert found.step_s == 4 + 4
    assert found.tokens_per_s == 6 / 8
    assert (found.staleness_max, found.versions_per_response) == (0, 1)
    # (3^2 + 5^2) / 2 pairs of a query and a key
    assert run([[2], [4]], training=dict(pair_s=0.5)).step_s == 4 + 8.5
    # A replica each: one has nothing to decode for 2 of the 2 x 8 s.
    found = run([[2], [4]], replicas=2, slots=1, training=dict(token_s=0.5))
    assert found.rollout_idle == pytest.approx(2 / 16)


def test_responses_wait_for_free_slots():
    # One slot: 2 + 4 decode steps. Two slots: 2 | 3, then 4 in the slot that was free first.
    assert run([[2], [4]], slots=1).step_s == 6
    assert run([[2], [3], [4]], slots=2).step_s == 2 + 4


def test_a_decode_step_takes_the_time_of_its_slowest_resource():
    # prompt 2, response 3: the steps attend to 2, 3 and 4 keys
    assert run([[3]], prompt_len=2, decode=(ReplicaUsage(per_key_s=1.0),)).step_s == 2 + 3 + 4
    # two sequences: 2 s of weights against 2 x 0.5 s of compute, then 2 x 3 s
    for per_sequence_s, seconds in ((0.5, 2.0), (3.0, 6.0)):
        both = (ReplicaUsage(fixed_s=2.0), ReplicaUsage(per_sequence_s=per_sequence_s))
        assert run([[1, 1]], decode=both).step_s == seconds


def test_a_prompt_is_prefilled_once_per_replica():
    costs = dict(prefill_s=0.5, prompt_len=4, training=dict(transfer_s=0.25))
    # Its last token is the input of the first of 3 steps. Then come the new weights.
    assert run([[3, 3]], **costs).step_s == 3 * 0.5 + 3 + 0.25
    # on two replicas of one slot, at the same time
    assert run([[3, 3]], replicas=2, slots=1, **costs).step_s == 3 * 0.5 + 3 + 0.25


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
    found = run([[4]], schedule("async", staleness), slots=1, training=dict(update_s=3.0))
    assert found.step_s == step_s and found.staleness_mean == found.staleness_max == mean
    assert found.trainer_idle == pytest.approx(trainer_idle)
    assert found.rollout_idle == pytest.approx(rollout_idle)


def test_a_trainer_that_is_slower_bounds_async():
    found = run([[4]], schedule("async", 1), slots=1, training=dict(update_s=5.0))
    # 5 s of training a step; the replica waits 1 s until the version allows the next group
    assert (found.step_s, found.trainer_idle) == (5.0, 0.0)
    assert found.rollout_idle == pytest.approx(1 / 5)


def test_async_with_one_step_of_staleness_drains_every_batch_to_its_longest_response():
    """Lengths 2 and 6 in every batch; an update takes 3 s, during which the next batch runs."""
    found = run([[2], [6]], schedule("async", 1), training=dict(update_s=3.0))
    assert found.step_s == 6 and found.trainer_idle == 3 / 6
    assert found.versions_per_response == 1 and found.staleness_mean == found.staleness_max == 1


def test_async_with_two_steps_of_staleness_has_two_batches_in_flight():
    """Lengths 2 and 6 in every batch, of which two run at the same time.

    Batches 0 and 1 start at 0 s and end at 6 s. The order of batch 2 comes after step 0, at 9 s:
    batches 2 and 3 start and end at 15 s. Step 1 was from 9 to 12 s, step 2 is from 15 to 18 s,
    then comes the order of batch 4, at 18 s. So two steps take 9 s, of which 3 s without an order.
    Batches 2 and 3 have version 1: they are one and two steps old when they are trained on.
    """
    found = run(
        [[2], [6]], schedule("async", 2), n_steps=8, n_warmup=2, training=dict(update_s=3.0)
    )
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
        [[4], [6], [8]],
        schedule("async", 2),
        groups_per_step=1,
        n_steps=10,
        n_warmup=4,
    )
    assert found.step_s == (30 - 12) / 6
    assert found.versions_per_response == pytest.approx((4 * 2 + 2) / 6)
    assert found.staleness_mean == pytest.approx((5 * 2 + 1) / 6) and found.staleness_max == 2


TWO_IN_FLIGHT = dict(slots=2, groups_per_step=1, n_steps=8, n_warmup=2, training=dict(update_s=1.0))


def test_partial_in_prompt_order_waits_for_the_next_group():
    """Lengths 2, 6, 2, 6, ..., a group per step, two in flight; an update takes 1 s.

    Groups 3 (6) and 4 (2) run together for 6 s, then both are trained on, one step after the other.
    Group 5 starts when group 4 is already complete, so it samples its first token after that step.
    """
    found = run([[2], [6]], schedule("partial", 1), **TWO_IN_FLIGHT)
    assert found.step_s == (6 + 2 * 1) / 2
    assert found.staleness_mean == 0.5 and found.versions_per_response == 1


def test_partial_by_arrival_trains_on_the_complete_groups_and_resumes_the_others():
    """Lengths 2, 6, 2, 6, ..., a group per step, at most two in flight; an update takes 1 s.

    Say group 3 (6) starts after update 2, when group 2 (2) is complete. Update 3 trains on group 2,
    which takes until 1 s later. Group 4 (2) starts then. Group 3 was started two versions before
    update 4 + 1, so update 4 waits for its 6 steps and trains on it; group 4 is complete by then.
    So two updates take 6 s of decoding and 2 s of training.
    """
    found = run([[2], [6]], schedule("partial", 1, order="arrival"), **TWO_IN_FLIGHT)
    assert run([[2], [6]], **TWO_IN_FLIGHT).step_s == (2 + 6) / 2 + 1
    assert found.step_s == (6 + 2 * 1) / 2
    assert found.staleness_max == 1 and found.versions_per_response == 1


def test_kv_of_unfinished_responses_is_computed_again_unless_kept():
    again, kept = (
        run(
            [[4], [6], [8]],
            schedule("partial", 1, keep_kv=keep_kv),
            prefill_s=0.01,
            prompt_len=2,
            **TWO_IN_FLIGHT,
        )
        for keep_kv in (False, True)
    )
    assert kept.step_s < again.step_s


@pytest.mark.parametrize("mode", ["partial", "async"])
@pytest.mark.parametrize("order", ["prompt", "arrival"])
def test_staleness_never_exceeds_the_limit_and_zero_is_sync(mode, order):
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, (40, 2)), 1, 200).astype(int)
    settings = dict(
        decode=(ReplicaUsage(0.1, 0.01, 1e-4),),
        prefill_s=1e-3,
        replicas=2,
        slots=5,
        groups_per_step=4,
        page_len=8,
        steps_per_dispatch=8,
        training=dict(token_s=1e-2, update_s=0.1, transfer_s=0.1),
    )
    for staleness in range(3):
        found = run(lengths, schedule(mode, staleness, order=order), **settings)
        assert found.staleness_max <= staleness
        assert 0 <= found.rollout_idle < 1 and 0 <= found.trainer_idle < 1
    zero = run(lengths, schedule(mode, 0, order=order), **settings)
    assert zero.step_s == pytest.approx(run(lengths, **settings).step_s)
