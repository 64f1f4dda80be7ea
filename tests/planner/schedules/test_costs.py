"""Costs of simulated schedules from the numbers of a plan (jaxrl/planner/schedules/costs.py)."""

import copy
import dataclasses

import numpy as np
import pytest

from jaxrl.config.keys import ScheduleConfig
from jaxrl.planner.schedules import search
from jaxrl.planner.schedules.costs import RunCosts, Split
from jaxrl.planner.schedules.lengths import response_lengths
from jaxrl.planner.schedules.report import schedules_text
from jaxrl.planner.schedules.search import Simulator, best
from tests.planner.tiny_run import TINY, run

# Eight devices, mesh fsdp 4 x tensor 2: four replicas of two devices, 8 sequences each. A step has
# 8 x 4 sequences of 64 + 64 tokens.
PLAN = {
    "topology": "cpu:8",
    "mesh": {"fsdp": 4, "tensor": 2},
    "n_replicas": 4,
    "max_concurrent_sequences": 16,
    "budget_bytes": 1000,
    "page_bytes": 64 * 2,  # 2 bytes per token
    "rollout_weight_bytes": 100,
    "resident": {"params": 40, "opt_state": 60},
    "lengths": {"prompt": 64, "response": 64},
    "phases": {
        "rollout": {"live_bytes": 500, "roofline_s": 5.0},
        "scoring": {"live_bytes": 300, "roofline_s": 2.0},
        "update": {"live_bytes": 700, "roofline_s": 6.0},
    },
    "programs": {
        "apply": {"seconds": {"memory": 0.5, "flops": 0.0}, "temp_bytes": 0},
        "prefill": {"seconds": {"memory": 0.5, "flops": 1.0}, "temp_bytes": 4},
        "reshard": {"seconds": {"memory": 0.25, "collectives": 0.125}, "temp_bytes": 0},
        "decode": {
            # 8 sequences x (64 + 32) keys of 2 bytes, 100 bytes of weights, and 16 bytes each
            "bytes_accessed": 8 * 96 * 2 + 100 + 8 * 16,
            # 4 L N H / tensor flops per key, and 100 per sequence
            "flops": 8 * 96 * 4 * 2 * 4 * 16 / 2 + 8 * 100,
            "seconds": {"memory": 1764.0, "flops": 197408.0, "collectives": 8.0},
            "temp_bytes": 4,
        },
    },
}  # fmt: skip


def costs(**changes) -> RunCosts:
    return RunCosts(run(), TINY, copy.deepcopy(PLAN) | changes)


def engine_costs():
    return costs().engine(costs().shared(), mean_len=64).costs


def test_decode_is_divided_into_weights_sequences_and_keys():
    # 1 byte and 1 flop take 1 s in this plan.
    memory, flops, collectives = engine_costs().decode
    assert dataclasses.astuple(memory) == pytest.approx((100.0, 16.0, 2.0))
    assert dataclasses.astuple(flops) == pytest.approx((0.0, 100.0, 256.0))
    assert dataclasses.astuple(collectives) == pytest.approx((0.0, 1.0, 0.0))


def test_a_plan_with_calibrated_times_is_simulated_with_them():
    programs = copy.deepcopy(PLAN["programs"])
    for name, seconds in (("decode", 4000.0), ("prefill", 2.0), ("apply", 0.6), ("reshard", 0.4)):
        programs[name]["calibrated_s"] = seconds
    phases = {name: {"calibrated_s": 9.0} | phase for name, phase in PLAN["phases"].items()}
    found = costs(
        topology="h100:8", calibrated_step_s=27.0, n_processes=2, programs=programs, phases=phases
    )
    decode, host = found.engine(found.shared(), mean_len=64).costs.decode
    # A byte takes 1 / 0.85 s, as above 2 per key and 16 per sequence. A process has two replicas;
    # a dispatch of 32 steps costs its host 0.12 ms, and 7.5 us per sequence.
    keys, rows = 8 * 96 * 2 / 0.85, 8 * 16 / 0.85
    assert decode.per_key_s == pytest.approx(2 / 0.85)
    assert decode.per_sequence_s == pytest.approx(16 / 0.85)
    assert decode.fixed_s == pytest.approx(4000 - keys - rows)
    assert dataclasses.astuple(host) == pytest.approx((0.12e-3 / 32, 2 * 7.5e-6 / 32, 0.0))
    training = found.training(found.shared())
    assert training.update_s == 1.2 and training.transfer_s == 0.4
    assert training.pair_s == costs().training(costs().shared()).pair_s / 0.4
    assert found.engine(found.shared(), 64).costs.prefill_s == 2.0 / 512


def test_training_on_fewer_devices_takes_longer():
    # 2 updates a step of 0.5 s; the other 7 s are for 32 sequences of 128 tokens
    shared, half = (costs().training(split) for split in (costs().shared(), costs().split(4)))
    assert shared.update_s == 1.0 and half.update_s == 2.0
    # Two scoring passes of 2 products of a query and a key, an update of 9; of 2 flops each, for
    # 2 layers and 4 heads of 16, on 8 devices; a flop takes 1 s.
    assert shared.pair_s == 2 * (2 * 2 + 9) * 2 * 4 * 16 / 8
    assert half.pair_s == 2 * shared.pair_s
    per_pair = {"seconds": {"memory": 1764.0, "flops": 0.0, "collectives": 8.0}}
    programs = PLAN["programs"] | {"decode": PLAN["programs"]["decode"] | per_pair}
    for split, slower in ((costs().shared(), 1), (costs().split(4), 2)):
        found = costs(programs=programs).training(split)
        assert found.token_s == pytest.approx(slower * 7 / (32 * 128))
    assert engine_costs().prefill_s == 1.0 / 512  # tokens of a prefill dispatch
    assert shared.transfer_s == 0.25
    assert half.transfer_s == pytest.approx(100 / 10e9)  # over the links


def test_rollout_devices_have_more_room_for_sequences():
    # A page has 128 bytes, a sequence of 128 tokens two pages. 1000 bytes less 500 of the largest
    # phase; of rollout devices less 100 of weights and 4 of temporaries.
    phases = {name: phase | {"live_bytes": 500} for name, phase in PLAN["phases"].items()}
    assert costs(phases=phases).sequences(costs().shared()) == 1
    assert costs().sequences(costs().split(4)) == 3
    assert costs().engine(costs().split(4), 64).n_replicas == 2


def test_splits_have_whole_replicas_and_ranks_and_fit():
    # 6 of 8 devices leave a quarter of them for training: 4 x 100 bytes of state on each
    assert [str(split) for split in costs().splits()] == ["2 + 6", "4 + 4", "6 + 2"]
    found = costs(budget_bytes=900).splits()
    assert [str(split) for split in found] == ["2 + 6", "4 + 4"]


@pytest.mark.parametrize(
    ("devices", "changes", "message"),
    [
        (8, {}, "8 rollout devices of 8 leave 0 for training"),
        (0, {}, "set a number between 2 and 6"),
        (3, {}, "not whole replicas of 2 .*set a multiple of 2"),
        (6, {"budget_bytes": 900}, "training on 2 devices needs"),
        (4, {"page_bytes": 800}, "no KV cache of a sequence"),
    ],
)
def test_a_split_that_cannot_be_is_rejected(devices, changes, message):
    with pytest.raises(ValueError, match=message):
        costs(**changes).split(devices)


@pytest.mark.thorough
def test_the_search_names_the_best_schedule(monkeypatch):
    monkeypatch.setattr(search, "STALENESS", (1,))
    lengths = response_lengths("lognormal?mean=30&sigma=1", 100, 4, limit=64)
    found = Simulator(costs(), lengths).search()
    assert [one.schedule.mode for one in found[:3]] == ["sync", "partial", "async"]
    chosen = best(found)
    most = max(one.outcome.tokens_per_s for one in found)
    assert chosen.outcome.tokens_per_s >= 0.98 * most
    text = schedules_text(costs(), found, lengths, "a lognormal")
    assert text.count("\n|") == len(found) + 2 and "\nbest: sync, 1.00x of sync\n" in text


def test_async_without_a_split_that_fits_is_rejected():
    lengths = np.full((10, 4), 20)
    with pytest.raises(ValueError, match="no split of 8 devices fits this run: training on 4"):
        Simulator(costs(budget_bytes=701), lengths).schedule(ScheduleConfig(mode="async"))
    assert Split(4, 4) in costs().splits()
