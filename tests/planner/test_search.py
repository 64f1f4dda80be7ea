"""The search ranks candidates by formulas; compiled plans decide (jaxrl/planner/search.py)."""

import dataclasses
from pathlib import Path

import pytest

from jaxrl.config.checks.memory import memory_errors
from jaxrl.config.choices import REMATS, REMATS_OF_1F1B
from jaxrl.config.command_line import override
from jaxrl.config.resolve import default_config
from jaxrl.models.vision.towers import with_trained_tower
from jaxrl.planner.chips import CHIPS
from jaxrl.planner.model_shape import tower_shape
from jaxrl.planner.plan import Plan
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.planner.report import search_text
from jaxrl.planner.search import (
    best_rollout_tensor,
    candidates,
    estimate,
    meshes,
    offload_sets,
    rank,
    rollout_tensors,
    search,
    varied_first,
)
from jaxrl.planner.sizes import CandidateSettings, model_sizes
from jaxrl.planner.topology import Topology
from tests.models.resized import resized
from tests.planner.tiny_job import GIB, MESH, OFFLOADS, SMALL, job, machine
from tests.planner.tiny_run import TINY, run

ROOT = Path(__file__).parents[2]
TIGHT = 2_354_000  # bytes


def test_candidates_are_the_meshes_that_divide_the_model():
    found = list(candidates(job()))
    # 2 KV heads: tensor 1 or 2; four token budgets; remat policies; sets of offloads
    n = 4 * len(REMATS) * len(OFFLOADS)
    assert [c.mesh for c in found[::n]] == [dict(fsdp=8), dict(fsdp=4, tensor=2)]
    assert {c.token_budget for c in found} == {128, 256, 512, 1024}
    assert {c.offload for c in found} == OFFLOADS
    assert len(found) == 2 * n


def test_a_limit_leaves_out_larger_budgets_only_of_settings_that_exceed_it():
    every, limited = list(candidates(job())), list(candidates(job(), TIGHT))
    assert [c for c in limited if c.bytes <= TIGHT] == [c for c in every if c.bytes <= TIGHT]
    larger = [c for c in limited if c.bytes > TIGHT]
    # One of each setting, which has the smallest budget that exceeds the limit.
    assert 0 < len(larger) == len({(*c.mesh.items(), c.remat, c.offload) for c in larger})
    assert len(limited) < len(every)


@pytest.mark.thorough
def test_long_rows_are_tried_with_mlps_in_chunks():
    long = run(learner__token_budget=8192, learner__buckets=(8192,))
    found = {(c.token_budget, c.mlp_chunk) for c in candidates(job(long))}
    assert {chunk for tokens, chunk in found if tokens == 8192} == {0, 4096}
    chosen = run(learner__token_budget=8192, learner__buckets=(8192,), learner__mlp_chunk=1024)
    chunked = next(candidates(job(chosen)))
    assert chunked.apply(chosen).learner.mlp_chunk == 1024
    assert "--config.learner.mlp_chunk=1024" in chunked.overrides(long)
    assert "mlp_chunk" not in chunked.overrides(chosen)


def test_meshes_depend_on_model_row_length_and_network():
    experts = resized(TINY, family="qwen3_moe", qkv_bias=False, E=8, top_k=2, F_expert=64)
    cfg = run()
    long = dataclasses.replace(
        cfg, learner=dataclasses.replace(cfg.learner, token_budget=4096, buckets=(4096,))
    )
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))

    def sizes(cfg, model, where, axis, tower=None) -> set[int]:
        planned = dataclasses.replace(job(cfg, model, where), tower=tower)
        return {mesh[axis] for mesh in meshes(planned)}

    assert sizes(cfg, TINY, machine(), "expert") == {1}
    assert sizes(cfg, experts, machine(), "expert") == {1, 2, 4, 8}
    assert sizes(cfg, TINY, machine(), "sequence") == {1}
    assert sizes(long, TINY, machine(), "sequence") == {1, 2}  # 2048 tokens per device
    assert sizes(cfg, TINY, machine(), "replica") == {1}
    assert sizes(cfg, TINY, nodes, "replica") == {1, 2}  # one node of 8 each
    slices = Topology("v5p:4x4x1", "tpu", CHIPS["v5p"], list(range(16)))
    assert sizes(cfg, TINY, slices, "replica") == {1, 2}
    assert sizes(cfg, TINY, slices, "stage") == {1}
    assert sizes(cfg, TINY, machine(), "stage") == {1}
    assert sizes(cfg, TINY, nodes, "stage") == {1, 2}
    assert sizes(cfg, resized(TINY, L=3), nodes, "stage") == {1}
    assert sizes(run(model__layers="list"), TINY, nodes, "stage") == {1}
    tower = tower_shape(str(ROOT / "tests/models/vision/golden/qwen3_vl"))
    assert tower is not None and len(tower.deepstack) == 2  # in the first stage
    assert sizes(cfg, TINY, nodes, "stage", tower) == {1}
    trained = with_trained_tower(resized(TINY, L=4), tower, "none")
    assert sizes(cfg, trained, nodes, "stage", tower) == {1, 2}


@pytest.mark.thorough
def test_pipelines_have_rows_for_every_stage_and_both_schedules():
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))
    cfg = run()
    staged = [c for c in candidates(job(cfg, where=nodes)) if c.mesh.get("stage") == 2]
    assert {c.token_budget for c in staged} == {4 * 128, 8 * 128, 16 * 128}
    assert {c.remat for c in staged if c.pipeline_schedule == "gpipe"} == set(REMATS)
    assert {c.remat for c in staged if c.pipeline_schedule == "1f1b"} == set(REMATS_OF_1F1B)
    chosen = next(c for c in staged if c.pipeline_schedule == "1f1b")
    assert "--config.mesh.stage=2" in chosen.overrides(cfg)
    assert "--config.learner.pipeline_schedule=1f1b" in chosen.overrides(cfg)
    applied = chosen.apply(cfg)
    assert applied.mesh.stage == 2 and applied.learner.pipeline_schedule == "1f1b"


@pytest.mark.parametrize(
    ("max_num_seqs", "memory_bytes", "tensor"),
    [
        (8, GIB, 2),  # both hold all 32 sequences at a time; 2 reads half of the weights per step
        (4, GIB, 1),  # 4 replicas of 2 devices hold half of the sequences: as fast as 8 of 1
        (4, TIGHT, 2),  # a replica of 1 device holds one sequence, of 2 three
    ],
)
def test_a_mesh_gets_the_fastest_tensor_axis_of_the_rollout(max_num_seqs, memory_bytes, tensor):
    cfg = run(rollout__max_num_seqs=max_num_seqs)
    planned = job(cfg, where=machine(float(memory_bytes)))
    mesh = dict(fsdp=8, expert=1)
    assert rollout_tensors(planned) == (1, 2)  # two KV heads
    assert best_rollout_tensor(planned, mesh, (1, 2)) == tensor
    chosen = next(c for c in candidates(planned) if c.mesh == dict(fsdp=8))
    assert chosen.rollout_tensor == chosen.apply(cfg).rollout.tensor == tensor
    assert ("--config.rollout.tensor=2" in chosen.overrides(cfg)) == (tensor == 2)


def test_kv_pages_are_released_where_more_sequences_then_fit():
    def chosen(memory_bytes: float, **changes):
        return estimate(job(run(**changes), where=machine(memory_bytes)), MESH)

    assert not chosen(float(GIB)).release_kv
    tight = chosen(float(TIGHT))
    assert tight.release_kv and "--config.rollout.release_kv=True" in tight.overrides(run())
    assert tight.step_s < chosen(float(TIGHT), schedule__mode="partial").step_s
    assert not chosen(float(TIGHT), schedule__mode="partial").release_kv


def test_a_tensor_axis_of_the_rollout_in_the_config_is_kept():
    assert rollout_tensors(job(run(rollout__tensor=2))) == (2,)
    assert rollout_tensors(job(run(rollout__layout="training"))) == ()
    assert best_rollout_tensor(job(), dict(fsdp=8, expert=1), ()) == 0
    sft = OfflineWorkload(responses_per_example=1, scores_policy=False, has_reference=False)
    assert rollout_tensors(job(workload=sft)) == ()


def test_plans_that_fit_are_ranked_with_kernels_one_after_the_other():
    def found(*, fits: bool, **times: float) -> Plan:
        plan = object.__new__(Plan)  # only what the order depends on
        vars(plan).update(fits=fits, **times)
        return plan

    plans = [
        found(fits=True, serial_step_s=3.0, expected_step_s=1.0),
        None,
        found(fits=False, serial_step_s=1.0, expected_step_s=1.0),
        found(fits=True, serial_step_s=2.0, expected_step_s=1.5),
    ]
    candidate = estimate(job(), MESH)
    ranked = sorted(((candidate, plan) for plan in plans), key=rank)
    assert [plan and plan.serial_step_s for _, plan in ranked] == [2.0, 3.0, 1.0, None]
    # by the calibrated time if the chip has factors
    plans = [found(fits=True, serial_step_s=s, calibrated_step_s=5 - s) for s in (1.0, 2.0)]
    ranked = sorted(((candidate, plan) for plan in plans), key=rank)
    assert [plan and plan.serial_step_s for _, plan in ranked] == [2.0, 1.0]


@pytest.mark.thorough
def test_idle_roles_wait_in_host_memory():
    """Without the reference, nothing is copied; a critic is on the devices for its own update."""
    cfg = run(algorithm__advantage="gae", critic__path="critic", reward_model__path="scorer")
    roles = {"critic": TINY, "reward_model": SMALL}
    planned = job(cfg, role_decoders=roles)
    assert planned.idle_roles == ("reference", "critic", "reward_model")
    kept = estimate(planned, MESH)
    for role in planned.idle_roles:
        offloaded = estimate(planned, dataclasses.replace(MESH, offload=(role,)))
        assert offloaded.bytes <= kept.bytes and offloaded.step_s > kept.step_s
    assert {c.offload for c in candidates(planned)} == {
        (),
        ("optimizer",),
        ("optimizer", *planned.idle_roles),
        ("optimizer", "gradients", *planned.idle_roles),
        ("policy",),
        ("optimizer", *planned.idle_roles, "policy"),
        ("optimizer", "gradients", *planned.idle_roles, "policy"),
    }


def test_the_policy_is_offloaded_in_rollouts_that_read_a_copy():
    def offloads(mesh: dict, **changes) -> list[tuple[str, ...]]:
        return offload_sets(job(run(**changes)), mesh, 0)

    assert ("policy",) in offloads({"fsdp": 8})
    assert ("policy",) not in offloads({"replica": 8})  # its replicas are those of the rollout
    int8 = dict(rollout__dtype="int8", algorithm__correction="token_tis")
    assert ("policy",) in offloads({"replica": 8}, **int8)
    assert ("policy",) not in offloads({"fsdp": 8}, rollout__layout="training")
    assert ("policy",) not in offloads({"fsdp": 8}, schedule__mode="partial")
    kept, offloaded = (
        estimate(job(), dataclasses.replace(MESH, offload=offload)) for offload in ((), ("policy",))
    )
    held = model_sizes(job(), "policy", MESH).held_bytes
    host = machine().chip.host_bytes_per_s
    assert offloaded.step_s - kept.step_s == pytest.approx(2 * held / host)  # there and back
    assert "release_kv" not in kept.overrides(run())
    assert "--config.learner.offload=policy" in offloaded.overrides(run())
    assert "--config.rollout.release_kv=True" in offloaded.overrides(run())
    chosen = offloaded.apply(run())
    assert chosen.rollout.release_kv and chosen.learner.offload == ("policy",)
    assert not memory_errors(chosen)


@pytest.mark.slow
def test_the_fastest_candidate_that_fits_is_reported_with_its_keys():
    found = search(job(), finalists=2)
    plans = [plan for _, plan in found if plan is not None]
    assert plans[0].fits and plans[0].serial_step_s <= plans[1].serial_step_s
    text = search_text(found, run())
    assert "time with kernels one after the other, time at peak rates" in text
    assert "--config.mesh.fsdp=" in text and "cheapest that fits: --config.mesh" in text


def test_the_options_of_a_candidate_undo_what_the_config_sets():
    replicas = dict(mesh__replica=2, mesh__fsdp=2, learner__zero=2)
    cfg = run(**replicas, learner__offload=("optimizer",), learner__mlp_chunk=64)
    found = estimate(job(cfg), CandidateSettings({"fsdp": 8}, 128, "full"))
    options = found.overrides(cfg)
    assert options == (
        "--config.mesh.replica=1 --config.mesh.fsdp=8 --config.mesh.tensor=1 "
        "--config.learner.token_budget=128 --config.learner.remat=full "
        "--config.learner.offload=() --config.learner.zero=0 --config.learner.mlp_chunk=0"
    )
    config = default_config()
    for option in options.split():
        override(config, *option.removeprefix("--config.").split("=", 1))
    assert config.learner.offload == () and config.mesh.tensor == 1 and config.learner.zero == 0


def test_different_settings_are_compiled_before_similar_ones():
    def entry(step_s: float, remat: str = "full", offload=(), **mesh: int):
        found = estimate(job(), CandidateSettings(mesh, 128, remat, offload))
        return dataclasses.replace(found, step_s=step_s)

    a, a_host, a_dots, b, b_dots, slow = ranked = [
        entry(1.0, fsdp=8),
        entry(1.01, offload=("optimizer",), fsdp=8),
        entry(1.015, "dots", fsdp=8),
        entry(1.02, fsdp=4, tensor=2),
        entry(1.03, "dots", fsdp=4, tensor=2),
        entry(1.2, tensor=8),
    ]
    assert varied_first(ranked) == [a, b, a_dots, b_dots, a_host, slow]


def test_too_little_memory_is_reported_with_numbers():
    with pytest.raises(
        ValueError, match=r"it needs at least .* GiB per device of .*; use more devices"
    ):
        search(job(where=machine(1024.0)))
