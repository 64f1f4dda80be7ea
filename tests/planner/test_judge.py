"""Tests of jaxrl/planner/judge.py: a judge with a separate model in the plan of a run."""

import dataclasses

import jax
import pytest

from jaxrl.planner.chips import CHIPS
from jaxrl.planner.judge import requests_per_response
from jaxrl.planner.memory import divide_memory, live_bytes
from jaxrl.planner.plan import calls_per_step, make_plan
from jaxrl.planner.programs import Lengths, run_programs
from jaxrl.planner.topology import topology
from sharding import make_mesh
from tests.models.resized import resized
from tests.planner.tiny_run import JUDGE, TINY, run

SMALL = resized(TINY, D=32, N=4, K=4, H=8, F=64)


@pytest.mark.parametrize(
    ("function", "requests"),
    [
        ("judge", 1),
        ("judge_pairs", 3),  # 4 (4 - 1) for a group of 4
        ("judge_pairs?opponents=2", 2),
        ("judge_pairs?opponents=2&swap=false", 1),
        ("judge_pairs?against=reference&reference=answer", 2),
        ("format", 0),
    ],
)
def test_requests_follow_from_the_rewards(function, requests):
    functions = (function, "judge") if function == "format" else (function,)
    cfg = run(**JUDGE | dict(reward__functions=functions))
    assert requests_per_response(cfg) == requests + (function == "format")


@pytest.mark.thorough
def test_a_judge_has_its_own_weights_pages_and_programs():
    """Its engine has tensor 2, as that of the rollout; a verdict has 256 tokens in 4 pages."""
    cfg, memory_bytes = run(**JUDGE), CHIPS["cpu"].memory_bytes
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, memory_bytes, {"judge": SMALL})
        before = run_programs(run(), TINY, memory_bytes)
        decode = parts.table["judge_decode"].lower().compile().memory_analysis()
    matrices = 256 * 32 + 2 * (4 * 32 * 32 + 3 * 64 * 32)
    biases, norms = 2 * 3 * 32, (2 * 2 + 1) * 32
    weights = 4 * (matrices // 2 + biases // 2 + norms)
    pages = 4 * 4 * 2 * (2 * 64 * 4 * 8) * 4 // 2  # 4 sequences, 2 layers, keys and values, fp32
    assert parts.resident == before.resident | {"judge": weights, "judge_kv": pages}
    programs = {name for name in parts.table if name not in before.table}
    assert programs == {f"judge_{kind}" for kind in ("prefill", "mixed", "copy_pages", "decode")}
    assert decode.argument_size_in_bytes > weights + pages
    assert set(parts.table["judge_decode"].counted_state) == {"judge", "judge_kv"}


@pytest.mark.thorough
def test_an_offloaded_judge_frees_its_memory_between_uses():
    cfg = run(**JUDGE, learner__offload=("judge",), rollout__release_kv=True)
    plan = make_plan(cfg, TINY, topology("cpu:8"), role_decoders={"judge": SMALL})
    assert "judge_kv" not in plan.resident
    assert plan.host_resident == {"judge": plan.resident["judge"]}
    assert plan.phases["scoring"].serial_s > 0
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, plan.chip.memory_bytes, {"judge": SMALL})
    memory = divide_memory(parts, plan.programs, plan.chip)
    # the KV pages of the rollout are there while a judge answers, and not in updates
    assert {"judge_decode", "decode"} <= memory.with_pages and "accumulate" not in memory.with_pages
    update = plan.programs["accumulate"]
    plain = dataclasses.replace(
        parts, resident={name: n for name, n in parts.resident.items() if name != "judge"}
    )
    alone = dataclasses.replace(
        update, counted_state=tuple(name for name in update.counted_state if name != "judge")
    )
    assert memory.live_bytes["accumulate"] == live_bytes(alone, plain, 0)


@pytest.mark.thorough
def test_a_judge_on_the_engine_of_the_rollout_adds_its_decode_program():
    """Decode with adjustments: the tokens that a grammar allows, in each row."""
    own = {name: value for name, value in JUDGE.items() if not name.endswith(("path", "seqs"))}
    cfg = run(**own | dict(reward__judge__weights="policy"))
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
        calls = calls_per_step(cfg, parts, 8, Lengths(64, 64))
    assert set(parts.resident) == {"params", "opt_state", "ref"}
    assert parts.table["judge_decode"].counted_state == parts.table["decode"].counted_state
    plain, adjusted = (parts.table[name].lower().as_text() for name in ("decode", "judge_decode"))
    assert len(adjusted) > len(plain)
    assert calls["judge_decode"] > 0 and calls["judge_decode"] % 64 == 0
