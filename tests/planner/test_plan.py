"""Plans: what a run needs, from the shape of the model alone.

Tests of jaxrl/plan.py and of jaxrl/planner: compilation.py, model_shape.py, plan.py, programs.py,
report.py and topology.py. tests/trainer/test_plan_check.py covers check.py.
"""

import collections
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import plan as plan_command
from jaxrl.config.config_file import load_config
from jaxrl.config.keys import MeshConfig, RoleConfig
from jaxrl.config.keys.schedule import ScheduleConfig
from jaxrl.config.resolve import resolve
from jaxrl.engine.api import Request
from jaxrl.engine.pages import PagePool
from jaxrl.engine.scheduler import Scheduler
from jaxrl.layout import rollout_layout, worker_mesh
from jaxrl.models.config import uniform_decoder
from jaxrl.models.files.hf_config import config_to_hf
from jaxrl.models.spec import count_params, is_spec
from jaxrl.models.vision.tower import tower_specs
from jaxrl.models.vision.towers import with_trained_tower
from jaxrl.planner import topology as topologies
from jaxrl.planner.chips import CHIPS, chip_of
from jaxrl.planner.compilation import compile_programs, machine_note, trip_counts
from jaxrl.planner.compiled.timeline import Collective, collective_seconds
from jaxrl.planner.memory import divide_memory, live_bytes
from jaxrl.planner.model_shape import model_shape, tower_shape
from jaxrl.planner.options import read
from jaxrl.planner.plan import (
    Plan,
    assemble_plan,
    calls_per_step,
    make_plan,
    mixed_dispatches,
    roofline,
)
from jaxrl.planner.programs import Lengths, OfflineWorkload, rollout_tower, run_programs
from jaxrl.planner.report import as_text
from jaxrl.planner.rollout_devices import sides
from jaxrl.planner.saved_plan import check_config
from jaxrl.planner.sizes import Job, model_sizes, settings_of
from jaxrl.planner.topology import Topology, topology
from jaxrl.planner.tower import tower_bytes
from jaxrl.trainer.offline.reward_model import score_objective
from sharding import bytes_per_device, make_mesh
from tests.models.resized import resized
from tests.planner.tiny_run import TINY, run

ROOT = pathlib.Path(__file__).parents[2]
EXPERTS = uniform_decoder(
    "mixtral", L=2, D=64, N=4, K=2, H=16, F=128, V=256, E=4, top_k=2, F_expert=32, stacked=True
)
JSON_KEYS = (
    "topology", "config", "mesh", "lengths", "fits", "programs", "phases", "resident",
    "budget_bytes", "page_bytes", "kv_pages", "n_replicas", "rollout_weight_bytes",
    "max_concurrent_sequences", "expected_step_s", "serial_step_s",
)  # fmt: skip
PROGRAM_KEYS = (
    "argument_bytes", "temp_bytes", "output_bytes", "flops", "bytes_accessed", "l2_bytes",
    "kernels_s", "kernels", "collectives", "seconds", "compile_s",
)  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(run(), TINY, topology("cpu:8"))


def test_the_plan_has_every_program_of_the_run_and_the_json_every_key(plan):
    found = json.loads(json.dumps(plan.json()))
    assert tuple(found) == JSON_KEYS
    check_config("plan.json", found, run())  # of the same config, whose "auto" it has resolved
    offloaded = dataclasses.replace(plan, host_resident={"opt_state": 8}).json()
    assert offloaded == found | {"host_resident": {"opt_state": 8}}
    assert list(found["programs"]) == [
        "accumulate", "apply", "score", "reference", "reshard", "prefill", "mixed", "copy_pages",
        "decode",
    ]  # fmt: skip
    assert all(tuple(program) == PROGRAM_KEYS for program in found["programs"].values())
    assert set(found["phases"]) == {"rollout", "scoring", "update"}
    assert found["fits"] and 0 < found["expected_step_s"] <= found["serial_step_s"]
    for program in found["programs"].values():
        for moved in program["collectives"].values():
            assert 0 <= moved["exposed_s"] <= moved["seconds"] * (1 + 1e-9)
    for name, program in plan.programs.items():
        assert max(found["programs"][name]["seconds"].values()) == roofline(program, plan.chip)[0]
    # the copy of a replica: see test_the_rollout_has_a_gathered_copy_of_the_weights
    copied = found["programs"]["reshard"]["output_bytes"]
    assert found["rollout_weight_bytes"] == pytest.approx(copied, rel=0.1)


@pytest.mark.parametrize(
    ("workload", "programs"),
    [
        pytest.param(
            OfflineWorkload(responses_per_example=1, scores_policy=False, has_reference=False),
            {"accumulate", "apply"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            OfflineWorkload(responses_per_example=2, scores_policy=True, has_reference=True),
            {"accumulate", "apply", "score", "reference"},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            OfflineWorkload(
                responses_per_example=2, scores_policy=False, has_reference=False, heads=("score",)
            ),
            {"accumulate", "apply", "values"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_offline_training_has_no_rollout(workload, programs, plan):
    cfg = run(algorithm__kl_coef=0.0)
    ours = make_plan(cfg, TINY, topology("cpu:8"), workload=workload)
    assert set(ours.programs) == programs and "rollout" not in ours.phases
    assert ours.fits and ours.kv_pages == ours.max_concurrent_sequences == 0
    assert ("ref" in ours.resident) == workload.has_reference
    # A head of D numbers over fsdp 4. The unembedding has no parameters: it is tied.
    head = 4 * 64 // 4 if "score" in workload.heads else 0
    assert ours.resident["params"] == plan.resident["params"] + head
    if head:
        logits = 3 * 2 * 256 * 256 * 64 / 2  # no products with the unembedding
        expected = plan.programs["accumulate"].cost.total_flops - logits
        assert ours.programs["accumulate"].cost.total_flops == pytest.approx(expected, rel=1e-3)
        # 8 pairs of 2 x 128 tokens on 4 ranks of 256
        scoring = ours.phases["scoring"].roofline_s, ours.programs["values"], ours.chip
        assert scoring[0] == pytest.approx(2 * roofline(*scoring[1:])[0])
    n_tokens = cfg.data.prompts_per_step * workload.responses_per_example * cfg.data.max_len
    assert ours.tokens_per_s * ours.expected_step_s == pytest.approx(n_tokens)
    assert "KV pages" not in as_text(ours) and "KV pages" in as_text(plan)
    tiny_chip = dataclasses.replace(topology("cpu:8").chip, memory_bytes=1e5)
    machine = dataclasses.replace(topology("cpu:8"), chip=tiny_chip)
    with jax.set_mesh(make_mesh(machine.devices, fsdp=4, tensor=2)):
        declared = run_programs(cfg, TINY, tiny_chip.memory_bytes, workload=workload)
    rejected = assemble_plan(declared, ours.programs, machine, ours.mesh, ours.lengths)
    assert not rejected.fits and rejected.misfit.endswith("allows of 0.00 GiB")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--job=ppo"], "set one of train, sft, dpo, reward_model"),
        (["--job=sft", "--schedule=async"], "offline training has no rollout"),
    ],
)
def test_jobs_without_a_plan_are_rejected(words, message):
    config = f"--config={ROOT / 'configs' / 'sft_gsm8k.py'}"
    with pytest.raises(SystemExit, match=message):
        read([config, "--topology=cpu:8", *words])


@pytest.mark.thorough
def test_the_command_plans_the_tower_of_a_run_with_images(monkeypatch):
    def made_with(*_, **named):
        raise KeyError(named["tower"])  # instead of a plan

    monkeypatch.setattr(plan_command, "make_plan", made_with)
    folder = str(ROOT / "tests/models/vision/golden/qwen3_vl")
    tower, text = tower_shape(folder), model_shape(str(ROOT / "tests/models/golden/qwen3_vl"))
    machine = Topology("h100", "gpu", CHIPS["h100"], [None])
    with pytest.raises(KeyError) as caught:
        plan_command.plan_job(Job(run(), text, machine, Lengths(8, 8), tower=tower))
    assert caught.value.args == (tower,)


@pytest.mark.thorough
def test_the_tower_and_features_of_images_are_counted():
    text = model_shape(str(ROOT / "tests/models/golden/qwen3_vl"))
    cfg, workload = (
        run(algorithm__kl_coef=0.0, mesh__tensor=1, mesh__replica=2),
        OfflineWorkload(1, False, False),
    )
    tower = tower_shape(str(ROOT / "tests/models/vision/golden/qwen3_vl"))
    tower = dataclasses.replace(tower, out_D=text.D)
    with jax.set_mesh(make_mesh(topology("cpu:8").devices, fsdp=4, replica=2)):
        plain, seen = (
            run_programs(cfg, text, 1e9, workload=workload, tower=one) for one in (None, tower)
        )
        lowered = [one.table["accumulate"].lower().in_avals for one in (plain, seen)]
    specs = jax.tree.leaves(tower_specs(tower), is_leaf=is_spec)
    n_params = sum(math.prod(s.shape) // (4 if "w_embed" in s.axes else 1) for s in specs)
    assert seen.resident == plain.resident | {"tower": 4 * n_params}
    sizes = [[a.shape for a in jax.tree.leaves(avals)] for avals in lowered]
    rows, T = cfg.learner.shapes[-1]
    n, D = len(tower.deepstack), tower.out_D
    B = 8 * rows
    more = [(B, T, D), (B, T), (B, T, n, D), (B, T, 3)]
    assert sorted(sizes[1]) == sorted([*sizes[0], *more])


def test_a_tower_of_rollout_workers_is_on_one_device_of_training():
    tower = tower_shape(str(ROOT / "tests/models/vision/golden/qwen3_vl"))
    n_bytes = 4 * count_params(tower_specs(tower))
    cfg = run(schedule__mode="async", schedule__rollout_workers=2)
    dtype = jnp.dtype("float32")
    with jax.set_mesh(make_mesh(fsdp=8)):
        assert rollout_tower(cfg, tower, TINY, dtype, ()) == {"rollout_tower": n_bytes}
        assert rollout_tower(run(), tower, TINY, dtype, ()) == {}


@pytest.mark.thorough
def test_a_tower_that_is_trained_is_a_part_of_the_policy():
    text = model_shape(str(ROOT / "tests/models/golden/qwen3_vl"))
    cfg, workload = (
        run(algorithm__kl_coef=0.0, mesh__tensor=1, mesh__replica=2),
        OfflineWorkload(1, False, False),
    )
    tower = tower_shape(str(ROOT / "tests/models/vision/golden/qwen3_vl"))
    tower = dataclasses.replace(tower, out_D=text.D)
    decoders = [with_trained_tower(text, tower, freeze) for freeze in ("all", "tower", "none")]
    with jax.set_mesh(make_mesh(topology("cpu:8").devices, fsdp=4, replica=2)):
        frozen, projector, every = (
            run_programs(cfg, one, 1e9, workload=workload, tower=tower) for one in decoders
        )
        inputs = every.table["accumulate"].lower().in_avals
    specs = tower_specs(tower)
    n_tower, n_projector = (
        sum(math.prod(s.shape) // (4 if "w_embed" in s.axes else 1) for s in jax.tree.leaves(part))
        for part in (specs, (specs.merger, specs.deepstack))
    )
    assert every.resident["params"] == frozen.resident["params"] + 4 * n_tower
    assert "tower" not in every.resident and "tower" not in projector.resident
    # Float32 weights have two moments.
    moments = [one.resident["opt_state"] for one in (frozen, projector, every)]
    assert moments[1:] == [moments[0] + 8 * n_projector, moments[0] + 8 * n_tower]
    rows, T = cfg.learner.shapes[-1]
    shapes = [a.shape for a in jax.tree.leaves(inputs)]
    assert (8, rows * T * tower.merge**2, tower.patch_features) in shapes
    jobs = [
        Job(cfg, one, topology("cpu:8"), Lengths(8, 8), workload=workload, tower=tower)
        for one in decoders
    ]
    settings = settings_of(jobs[0])
    sizes = [model_sizes(job, "policy", settings) for job in jobs]
    found = [tower_bytes(j, tower, s, settings) for j, s in zip(jobs, sizes, strict=True)]
    state, work = zip(*found, strict=True)
    assert state[0] < state[1] < state[2] and work[0] == 0 < work[1] < work[2]
    n = sum(math.prod(s.shape) for s in jax.tree.leaves(specs))
    shards = 4  # fsdp
    np.testing.assert_allclose(state[2], 3 * 4 * n / shards, rtol=1e-2)


@pytest.mark.thorough
@pytest.mark.parametrize(("program", "deltas"), [("prefill", []), ("mixed", [(64,)])])
def test_prefill_reads_the_features_of_images(program, deltas):
    text = model_shape(str(ROOT / "tests/models/golden/qwen3_vl"))
    tower = tower_shape(str(ROOT / "tests/models/vision/golden/qwen3_vl"))
    tower = dataclasses.replace(tower, out_D=text.D)
    cfg = run(algorithm__kl_coef=0.0, mesh__tensor=1, mesh__replica=2)
    with jax.set_mesh(make_mesh(topology("cpu:8").devices, fsdp=4, replica=2)):
        plain, seen = (run_programs(cfg, text, 1e9, tower=one) for one in (None, tower))
        lowered = [one.table[program].lower().in_avals for one in (plain, seen)]
    sizes = [collections.Counter(a.shape for a in jax.tree.leaves(avals)) for avals in lowered]
    B, T = next(shape[:2] for shape in sizes[1] if shape[2:] == (3,))
    n, D = len(tower.deepstack), tower.out_D
    more = [(B, T, D), (B, T), (B, T, n, D), (B, T, 3), *deltas]  # deltas: of decode's positions
    assert sizes[1] == sizes[0] + collections.Counter(more)


def test_state_bytes_follow_from_the_parameter_table(plan):
    # fsdp 4 x tensor 2 shard every matrix 8 ways; biases (of q, k, v) 2 ways, norms not at all.
    # V*D + L * (q, o: 2 * 64*64, k, v: 2 * 32*64, mlp: 3 * 128*64)
    matrices = 256 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    biases, norms = 2 * (64 + 32 + 32), (2 * 2 + 1) * 64
    assert plan.resident["params"] == 4 * (matrices // 8 + biases // 2 + norms)
    assert plan.resident["ref"] == plan.resident["params"]
    # two float32 moments of everything, and a counter or two
    assert 0 <= plan.resident["opt_state"] - 2 * plan.resident["params"] <= 16
    # a page: 2 * L * K * 64 tokens * H floats, over tensor 2
    assert plan.page_bytes == 2 * 2 * 2 * 64 * 16 * 4 // 2


def test_adapters_alone_have_moments_and_the_base_is_the_reference():
    cfg = run(lora__rank=4, lora__target_modules=("q_proj", "down_proj"))
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
        full = run_programs(run(), TINY, CHIPS["cpu"].memory_bytes)
    # A [4, 64] over fsdp, B [64, 4] over tensor; A [4, 128] over tensor, B [64, 4] over fsdp
    adapters = 2 * (4 * 64 // 4 + 64 * 4 // 2 + 4 * 128 // 2 + 64 * 4 // 4)
    assert parts.resident["params"] == 4 * adapters
    assert parts.resident["base"] == full.resident["params"]
    assert 0 <= parts.resident["opt_state"] - 2 * 4 * adapters <= 16
    assert "ref" in full.resident and "ref" not in parts.resident
    counted = {name: program.counted_state for name, program in parts.table.items()}
    assert counted["accumulate"] == ("params", "base")
    assert counted["reference"] == ("ref_aliased",)  # training's base
    assert parts.role_weights["ref_aliased"] == parts.resident["base"]
    assert not parts.role_weights["ref_copied"]
    assert counted["apply"] == ("params", "opt_state")


@pytest.mark.parametrize(
    "sizes",
    [
        dict(replica=4, tensor=2),
        pytest.param(dict(fsdp=4, tensor=2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_merged_adapters_take_a_copy_of_the_weights_that_they_change(sizes):
    cfg = run(lora__rank=4, lora__target_modules=("q_proj", "down_proj"), lora__merge=True)
    cfg = dataclasses.replace(cfg, mesh=MeshConfig(**({"fsdp": 1} | sizes)))
    with jax.set_mesh(make_mesh(**sizes)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
        unmerged = dataclasses.replace(cfg, lora=dataclasses.replace(cfg.lora, merge=False))
        before = run_programs(unmerged, TINY, CHIPS["cpu"].memory_bytes)
        weights = rollout_layout(cfg, parts.decoder, np.dtype("float32")).abstract_weights(
            parts.decoder, jax.sharding.get_mesh()
        )
    merged = 4 * 2 * (64 * 64 + 64 * 128) // 2  # q and down of 2 layers over tensor
    aliased = [p.role_weights["rollout_aliased"] for p in (parts, before)]
    if "fsdp" not in sizes:  # the other weights are read in place
        assert "reshard" not in parts.table
        assert aliased[0] == parts.resident["base"] - merged
    assert aliased[0] <= aliased[1]
    assert weights.cfg.lora is None and bytes_per_device(weights) - aliased[0] >= merged


def test_a_quantized_base_is_counted_in_its_own_format():
    cfg = run(lora__rank=4, lora__base_dtype="nf4")
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
    # Two codes a byte, over 8 devices. A scale for 64 inputs (16 for o, whose heads have 16), over
    # the devices that share the outputs: q, k, v, o, gate, up, down.
    codes = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64) // 2 // 8
    scales = 2 * (64 // 2 + 32 // 2 + 32 // 2 + 4 * 64 // 8 + 128 // 2 + 128 // 2 + 2 * 64 // 8)
    others = 256 * 64 // 8 + 2 * (64 + 32 + 32) // 2 + (2 * 2 + 1) * 64  # embedding, biases, norms
    assert parts.resident["base"] == codes + 4 * scales + 4 * others


@pytest.mark.thorough
def test_a_plan_with_adapters_takes_less_memory_than_full_training(plan):
    ours = make_plan(run(lora__rank=1), TINY, topology("cpu:8"))
    assert ours.fits
    update, full = (p.programs["accumulate"].cost.total_flops for p in (ours, plan))
    assert 0.6 * full < update < 0.95 * full  # no gradients of the frozen weights
    for name in ("accumulate", "apply"):
        assert ours.programs[name].argument_bytes < plan.programs[name].argument_bytes
    assert ours.phases["update"].live_bytes < plan.phases["update"].live_bytes


def test_offloaded_state_takes_no_device_memory_while_unused(plan):
    cfg = run(learner__offload=("optimizer", "reference"))
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, plan.chip.memory_bytes)
        before = run_programs(run(), TINY, plan.chip.memory_bytes)
    assert parts.resident["opt_state"] < 64  # counters
    live = {
        name: live_bytes(
            dataclasses.replace(p, counted_state=parts.table[name].counted_state), parts, 0
        )
        for name, p in plan.programs.items()
    }
    resident_live = {name: live_bytes(p, before, 0) for name, p in plan.programs.items()}
    opt, ref = plan.resident["opt_state"], plan.resident["ref"]
    saved = {name: round((resident_live[name] - live[name]) / ref, 3) for name in live}
    # Moments are twice the weights. `reference` has the reference on the devices, and
    # `apply` the moments.
    assert round(opt / ref, 3) == 2
    assert saved == {
        "accumulate": 3, "apply": 1, "score": 3, "reference": 2, "reshard": 3,
        "prefill": 3, "mixed": 3, "copy_pages": 3, "decode": 3,
    }  # fmt: skip


def test_offloaded_gradients_are_arguments_in_host_memory(plan):
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(run(learner__offload=("gradients",)), TINY, plan.chip.memory_bytes)
        accumulate = parts.table["accumulate"].lower()
    sums = parts.host_resident["gradients"]
    assert sums == plan.resident["params"]  # both float32
    kinds = [a.sharding.memory_kind for a in jax.tree.leaves(accumulate.out_info.grads)]
    assert set(kinds) == {"pinned_host"}


def test_the_larger_sums_of_gradients_count_in_host_memory(plan):
    cfg = run(
        learner__offload=("optimizer", "gradients"), algorithm__advantage="gae", critic__path="c"
    )
    larger = {"critic": resized(TINY, L=2 * TINY.L)}
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, plan.chip.memory_bytes, larger)
    critic = parts.resident["critic"]
    assert parts.host_resident["gradients"] == critic > parts.resident["params"]
    assert parts.host_resident["critic_opt_state"] == pytest.approx(2 * critic, rel=1e-3)


def test_offloaded_roles_take_no_device_memory_in_other_phases(plan):
    """`counted_state` has what a program needs no extra device memory for."""
    cfg = run(
        learner__offload=("critic", "reward_model"),
        algorithm__advantage="gae",
        critic__path="critic",
        reward_model__path="scorer",
    )
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, plan.chip.memory_bytes)
    on_host = ("critic", "reward_model")
    assert parts.host_resident == {name: parts.resident[name] for name in on_host}
    for program in parts.table.values():
        counted = set(program.counted_state)  # arguments, or in host memory
        assert {"critic", "reward_model"} <= counted


def test_an_offloaded_policy_takes_no_device_memory_in_rollouts(plan):
    cfg = run(learner__offload=("policy",), rollout__release_kv=True)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, plan.chip.memory_bytes)
        before = run_programs(run(), TINY, plan.chip.memory_bytes)
    params, aliased = parts.resident["params"], parts.role_weights["rollout_aliased"]
    assert parts.host_resident == {"params": params}
    decode = plan.programs["decode"]
    now = {name: program.counted_state for name, program in parts.table.items()}
    moved = dataclasses.replace(decode, counted_state=now["decode"])
    # The copy has the shared arrays, which counted as training's before.
    assert live_bytes(decode, before, 0) - live_bytes(moved, parts, 0) == params - aliased
    assert "params" not in now["reshard"] and "params" in now["score"] + now["accumulate"]
    programs = {
        name: dataclasses.replace(p, counted_state=now[name]) for name, p in plan.programs.items()
    }
    memory = divide_memory(parts, programs, plan.chip)
    assert "reshard" not in memory.with_pages and "decode" in memory.with_pages
    copy = memory.live_bytes["the copy of the rollout"]
    assert copy == sum(parts.resident.values()) + parts.role_weights["rollout_made"]


def test_the_rollout_has_a_gathered_copy_of_the_weights(plan):
    """fsdp 4 x tensor 2: a replica's copy of the matrices is sharded over tensor only.

    Biases and norms are not copied.
    """
    matrices = 256 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    reshard, decode = plan.programs["reshard"], plan.programs["decode"]
    assert reshard.argument_bytes == 4 * matrices // 8
    assert reshard.output_bytes == pytest.approx(4 * matrices // 2, abs=1024)
    assert decode.argument_bytes > 4 * matrices // 2
    state = sum(plan.resident.values())
    assert plan.phases["rollout"].live_bytes >= state + 4 * matrices // 2
    # Only tokens and two logprobs of 32 steps of 4 x 8 sequences; the smallest weight has 8 KiB.
    gathered = decode.cost.collectives_by_kind().get("all-gather", {"bytes": 0})["bytes"]
    assert gathered < 3 * 4 * 8 * 32 * 4 + 1024


def test_separate_rollout_devices_have_two_copies_of_the_weights_and_no_training_state(plan):
    schedule = ScheduleConfig(mode="async", rollout_devices=4)
    cfg = dataclasses.replace(run(), schedule=schedule, mesh=MeshConfig(fsdp=2, tensor=2))
    devices = jax.devices()[:8]
    with jax.set_mesh(make_mesh(devices[:4], fsdp=2, tensor=2)):
        parts = run_programs(cfg, TINY, 2**30, rollout_devices=devices[4:])
        assert "all-gather" in parts.table["send"].lower().compile().as_text()
    assert "reshard" not in parts.table
    programs = {name: p for name, p in plan.programs.items() if name != "reshard"}
    machine = topology("cpu:8")
    split = assemble_plan(parts, programs, machine, {"fsdp": 2, "tensor": 2}, plan.lengths)
    weights = parts.role_weights["rollout_aliased"]
    assert weights == pytest.approx(plan.rollout_weight_bytes, rel=0.02)  # tensor 2 in both
    pool_bytes = parts.pool_bytes.of_pages(parts.n_pages)
    rollout = [p for p in programs.values() if "rollout_aliased" in p.counted_state]
    assert split.phases["rollout"].live_bytes == weights + max(
        p.footprint_bytes - pool_bytes for p in rollout
    )
    assert split.phases["update"].live_bytes > sum(split.resident.values())
    assert split.kv_phases == ("rollout",) and split.n_replicas == 2
    times = {name: phase.roofline_s for name, phase in split.phases.items()}
    rollout_s = times.pop("rollout")
    assert split.expected_step_s == pytest.approx(max(rollout_s, sum(times.values())))
    assert "rollout on 4 more devices" in as_text(split)
    assert split.json()["n_rollout_devices"] == 4


@pytest.mark.thorough
def test_each_rollout_worker_has_an_engine_and_one_copy_of_the_weights(plan):
    schedule = ScheduleConfig(mode="async", rollout_workers=3)
    mesh = MeshConfig(fsdp=4, tensor=2)
    cfg = dataclasses.replace(run(rollout__tensor=1), schedule=schedule, mesh=mesh)
    machine = topology("cpu:8")
    training, worker = sides(cfg, machine)
    assert (len(training), len(worker)) == (8, 1)
    with jax.set_mesh(make_mesh(training, fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, 2**30, rollout_devices=worker)
    assert not {"send", "reshard"} & set(parts.table)
    weights = parts.role_weights["rollout_aliased"]
    decoding = parts.table["decode"].lower().compile().memory_analysis()
    assert decoding.argument_size_in_bytes > weights > 1.9 * plan.rollout_weight_bytes  # tensor 2
    programs = {name: p for name, p in plan.programs.items() if name != "reshard"}
    split = assemble_plan(parts, programs, machine, {"fsdp": 4, "tensor": 2}, plan.lengths)
    pool_bytes = parts.pool_bytes.of_pages(parts.n_pages)
    decode = programs["decode"].footprint_bytes - pool_bytes
    assert live_bytes(programs["decode"], parts, pool_bytes) == decode
    assert live_bytes(programs["copy_pages"], parts, pool_bytes) == (
        weights + programs["copy_pages"].footprint_bytes - pool_bytes
    )
    assert split.kv_phases == ("rollout",) and split.n_replicas == 3
    assert "rollout on 3 workers with 1 more devices each" in as_text(split)
    assert (split.json()["n_rollout_devices"], split.json()["n_workers"]) == (3, 3)


def test_a_worker_that_spans_hosts_has_the_devices_of_all():
    schedule = ScheduleConfig(mode="async", rollout_workers=3, hosts_per_worker=2)
    cfg = dataclasses.replace(run(rollout__tensor=2), schedule=schedule)
    training, worker = sides(cfg, topology("cpu:8"))
    assert (len(training), len(worker)) == (8, 2)
    assert worker_mesh(cfg, worker).shape["tensor"] == 2


def test_a_worker_with_other_devices_than_the_topology_is_refused():
    schedule = ScheduleConfig(mode="async", rollout_workers=3, worker_accelerator="gpu:8")
    with pytest.raises(ValueError, match=r"worker_accelerator='gpu:8' reserves no cpu.*set 'cpu'"):
        sides(dataclasses.replace(run(), schedule=schedule), topology("cpu:8"))


@pytest.mark.thorough
def test_an_int8_rollout_has_smaller_weights_and_pages(plan):
    cfg = run(rollout__dtype="int8", rollout__kv_dtype="int8", algorithm__correction="token_tis")
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
        programs = {name: parts.table[name].lower().compile() for name in ("reshard", "decode")}
    reshard, decode = (program.memory_analysis() for program in programs.values())
    # a page: 2 * L * K * 64 tokens * (H bytes and a float32), over tensor 2
    assert parts.pool_bytes.page_bytes[0] == 2 * 2 * 2 * 64 * (16 + 4) // 2
    embed, matrices = 256 * 64, 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    scales = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)  # of q k v o gate up down
    # Copied from shards over fsdp and tensor to tensor only; the scales of q k v gate up
    # stay sharded over tensor.
    assert parts.role_weights["rollout_copied"] == 4 * embed // 8
    copied = (4 * embed + matrices) // 8 + 4 * 2 * 128 // 4
    assert reshard.argument_size_in_bytes == pytest.approx(copied, abs=512)
    assert reshard.output_size_in_bytes == pytest.approx((4 * embed + matrices) // 2, abs=2048)
    weights = (4 * embed + matrices) // 2 + 4 * scales
    pool, default = parts.pool_bytes.of_pages(parts.n_pages), plan.programs["decode"].argument_bytes
    assert weights + pool < decode.argument_size_in_bytes < 0.45 * default


@pytest.mark.thorough
def test_a_separate_critic_has_its_own_state_and_programs(plan):
    """The critic is sharded over fsdp 2 x tensor 4 and has half the policy's width."""
    small = resized(TINY, D=32, N=4, K=4, H=8, F=64)
    cfg = run(algorithm__advantage="gae", critic__token_budget=512)
    own = dataclasses.replace(cfg.critic, mesh=RoleConfig(tensor=4))
    cfg = dataclasses.replace(cfg, critic=own)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes, {"critic": small})
        calls = calls_per_step(cfg, parts, 8, plan.lengths)
        critic_programs = ("values", "critic_accumulate", "critic_apply")
        compiled = {name: parts.table[name].lower().compile() for name in critic_programs}
    # V*D + L * (q, o, k, v: 4 * 32*32, mlp: 3 * 64*32) over 4 x 2; q, k, v biases over 4;
    # a head over 2; norms
    matrices = 256 * 32 + 2 * (4 * 32 * 32 + 3 * 64 * 32)
    biases, norms, head = 2 * 3 * 32, (2 * 2 + 1) * 32, 32
    resident = parts.resident
    assert resident["critic"] == 4 * (matrices // 8 + biases // 4 + head // 2 + norms)
    assert 0 <= resident["critic_opt_state"] - 2 * resident["critic"] <= 16
    for name, program in compiled.items():
        held = sum(resident[part] for part in parts.table[name].counted_state)
        assert held <= program.memory_analysis().argument_size_in_bytes, name
    # 32 sequences of 128 tokens: 2 ranks x 512 tokens a micro-batch; the policy's 4 ranks have 256
    assert (calls["values"], calls["critic_accumulate"], calls["critic_apply"]) == (4, 4, 2)
    assert calls["accumulate"] == 4
    # all of it is in addition to the policy's programs
    assert live_bytes(plan.programs["decode"], parts, 0) - live_bytes(
        plan.programs["decode"], dataclasses.replace(parts, resident=plan.resident), 0
    ) == sum(resident.values()) - sum(plan.resident.values())


@pytest.mark.thorough
def test_a_teacher_has_its_own_weights_and_scoring_program(plan):
    small = resized(TINY, D=32, N=4, K=4, H=8, F=64)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(
            run(algorithm__teacher="small"), TINY, CHIPS["cpu"].memory_bytes, {"teacher": small}
        )
        scoring = parts.table["reference"].lower().compile().memory_analysis()
    # as above, over fsdp 4 x tensor 2
    matrices, biases, norms = 256 * 32 + 2 * (4 * 32 * 32 + 3 * 64 * 32), 2 * 3 * 32, 5 * 32
    assert parts.resident["ref"] == 4 * (matrices // 8 + biases // 2 + norms)
    assert parts.resident["params"] == plan.resident["params"]
    batch_bytes = scoring.argument_size_in_bytes - parts.resident["ref"]
    score = plan.programs["score"]
    assert batch_bytes == score.argument_bytes - plan.resident["params"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "decoder", "same_as"),
    [
        ({}, TINY, "score"),
        (dict(lora__rank=4), TINY, ""),  # the base has no adapters
        (dict(learner__router_replay="R3"), EXPERTS, ""),  # it chooses its own experts
        (dict(learner__router_replay="off"), EXPERTS, "score"),
        (dict(ref__token_budget=512), TINY, ""),
        (dict(algorithm__teacher="same"), TINY, "score"),
    ],
)
def test_the_reference_is_scored_by_the_policys_program_if_the_run_does_so(
    changes, decoder, same_as
):
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(run(**changes), decoder, CHIPS["cpu"].memory_bytes)
        sizes = {
            name: [a.shape for a in jax.tree.leaves(parts.table[name].lower().in_avals)]
            for name in ("score", "reference")
        }
    assert parts.table["reference"].same_as == same_as
    assert (sizes["score"] == sizes["reference"]) == (same_as == "score")


@pytest.mark.thorough
def test_labels_of_reward_models_are_counted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(TINY)))
    cfg = run(
        model__path=str(tmp_path),
        reward_model__path=str(tmp_path),
        reward_model__label_weights=(1.0, 0.5, 0.25),
    )
    trained = run(reward_model__objective="attributes", reward_model__attributes=("a", "b"))
    job = plan_command.make_job(cfg, TINY, topology("cpu:8"), Lengths(8, 8), {})
    assert len(job.role_decoders["reward_model"].labels) == 3
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        one, three = (
            run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes, {"reward_model": model})
            for model in (TINY, job.role_decoders["reward_model"])
        )
        labels = score_objective(trained).workload(trained)
        two = run_programs(trained, TINY, CHIPS["cpu"].memory_bytes, workload=labels)
        inputs = jax.tree.leaves(two.table["accumulate"].lower().in_avals)
    assert (4 * 2, 128, 2) in [a.shape for a in inputs]  # values of the rows of 4 ranks
    # A row of D numbers for each further label, over fsdp 4.
    assert three.resident["reward_model"] == one.resident["reward_model"] + 2 * 4 * 64 // 4
    assert two.resident["params"] == one.resident["params"] + 2 * 4 * 64 // 4


@pytest.mark.thorough
def test_a_reward_model_has_its_own_weights_and_scoring_program(plan):
    """The reward model is sharded over fsdp 2 x tensor 4 and has half the policy's width.

    It has its own token budget.
    """
    small = resized(TINY, D=32, N=4, K=4, H=8, F=64)
    cfg = run(reward_model__path="judge", reward_model__token_budget=512)
    own = dataclasses.replace(cfg.reward_model, mesh=RoleConfig(tensor=4))
    cfg = dataclasses.replace(cfg, reward_model=own)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes, {"reward_model": small})
        calls = calls_per_step(cfg, parts, 8, plan.lengths)
        scoring = parts.table["reward_model"].lower().compile().memory_analysis()
    assert set(parts.table) == {*plan.programs, "reward_model"}
    # as of the critic above, with the same shape
    matrices = 256 * 32 + 2 * (4 * 32 * 32 + 3 * 64 * 32)
    biases, norms, head = 2 * 3 * 32, (2 * 2 + 1) * 32, 32
    weights = 4 * (matrices // 8 + biases // 4 + head // 2 + norms)
    assert parts.resident == plan.resident | {"reward_model": weights}
    rows = scoring.argument_size_in_bytes - weights
    assert 0 < rows < 64 * 512  # a few fields of 512 tokens
    # 32 sequences of 128 tokens: 2 ranks x 512 tokens a micro-batch; the policy's 4 ranks have 256
    assert (calls["reward_model"], calls["score"]) == (4, 4)
    with_model = live_bytes(plan.programs["decode"], parts, 0)
    without_model = live_bytes(
        plan.programs["decode"], dataclasses.replace(parts, resident=plan.resident), 0
    )
    assert with_model - without_model == weights


def test_a_shared_critic_costs_a_head_and_a_program(plan):
    cfg = run(algorithm__advantage="gae", critic__shared=True)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
    assert set(parts.table) == {*plan.programs, "values"}
    assert parts.table["values"].counted_state == ("params",)
    assert parts.resident["params"] == plan.resident["params"] + 4 * 64 // 4


@pytest.mark.thorough
def test_scoring_by_other_rules_is_another_program():
    cfg = run(score__tensor=1, learner__mini_batch_prompts=4)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
        joined = [parts.table[name].row.n_joined[-1] for name in ("score", "reference")]
        assert joined == [2, 1]  # 8 ranks instead of 4
        programs = (
            parts.table["reshard_score"].lower().compile(),
            parts.table["score"].lower().compile(),
        )
    copy, score = (program.memory_analysis() for program in programs)
    weights = parts.role_weights["score_aliased"] + copy.output_size_in_bytes
    rows = 8 * 2 * 128 * 4 // 8  # int32 [rank rows, tokens] of a device
    assert score.argument_size_in_bytes == pytest.approx(weights + 5 * rows, rel=0.02)


def test_a_reference_on_another_mesh_is_the_base_of_the_adapters_resharded_for_scoring():
    cfg = run(lora__rank=4, ref__tensor=1)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
    assert "ref" not in parts.resident  # no second base
    aliased, copied = (parts.role_weights[f"ref_{kind}"] for kind in ("aliased", "copied"))
    assert 0 < aliased < copied and aliased + copied == parts.resident["base"]
    assert parts.table["reshard_ref"].counted_state == ("ref_copied",)
    assert parts.table["reference"].counted_state == ("ref_aliased",)


def test_flops_of_the_update_are_four_passes_over_the_weights_and_attention(plan):
    # Per device: 256 tokens per rank; forward, recomputed forward and two backward passes over the
    # layers' matrices, sharded over tensor 2; the head in forward, again in backward, and its two
    # gradients.
    layers = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    head = 256 * 64
    products = 2 * 256 * (4 * layers + 4 * head) / 2
    # Attention: 2 layers, 2 heads, 256 queries, 2 blocks of 64 keys each, 16 features of a key and
    # 64 (padded) of a value; forward, recomputed forward, and in backward scores, dv, dp, dq, dk
    # of 16 + 64 + 64 + 16 + 16 features.
    attention = 2 * 2 * 2 * 256 * 128 * (2 * (16 + 64) + 176)
    flops = plan.programs["accumulate"].cost.total_flops
    # Backward does not need the last product of a layer again.
    assert 0.9 * (products + attention) <= flops <= products + attention
    assert flops > 3 * plan.programs["score"].cost.total_flops


@pytest.mark.thorough
def test_the_head_is_counted_for_the_tokens_of_a_device(plan):
    cfg = run(mesh__tensor=1, mesh__sequence=2, learner__logprob_chunk=32, score__token_budget=512)
    machine, lengths = topology("cpu:8"), Lengths(64, 64)
    with jax.set_mesh(make_mesh(machine.devices, fsdp=4, sequence=2)):
        parts = run_programs(cfg, TINY, machine.chip.memory_bytes)
        only = dataclasses.replace(parts, table={"score": parts.table["score"]})
        score = compile_programs(only, lengths, machine)["score"]
        trips = [trip_counts(name, parts, lengths) for name in ("score", "reference")]
    # 128 of the 256 tokens of a rank, in chunks of 32; scoring joins two micro-batches.
    assert [trip("logprob/while") for trip in trips] == [8, 4]
    # Half of each row by whole matrices costs as much as whole rows by half of each matrix.
    twice = 2 * plan.programs["score"].cost.total_flops
    assert score.cost.total_flops == pytest.approx(twice, rel=1e-3)


def test_pipeline_stages_share_the_tokens_of_the_head():
    cfg = run(mesh__tensor=1, mesh__stage=2, learner__logprob_chunk=32, learner__halvings=0)
    with jax.set_mesh(make_mesh(fsdp=4, stage=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
        assert trip_counts("accumulate", parts, Lengths(64, 64))("logprob/while") == 4


def test_a_mixed_dispatch_costs_prefill_plus_decode(plan):
    prefill, mixed, decode = (plan.programs[name] for name in ("prefill", "mixed", "decode"))
    # Prompt rows attend to 32 of 64 tokens, a block of 64 keys; decode rows to 64 and 32,
    # two blocks.
    work = prefill.cost.total_flops, decode.cost.total_flops
    assert mixed.cost.total_flops == sum(work) and work[0] > work[1]
    assert mixed.counted_state == decode.counted_state
    assert mixed.argument_bytes >= max(prefill.argument_bytes, decode.argument_bytes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(rollout__prefix_cache=False),  # chunked prompts need the prefix cache
        dict(
            rollout__max_num_seqs=3
        ),  # 3 sequences have 127 keys at most, 2 rows each; a dispatch 8
    ],
)
def test_a_run_that_never_mixes_has_no_program_for_it(changes, plan):
    cfg = run(**changes)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
        calls = calls_per_step(cfg, parts, 3, Lengths(10_000, 64))
    assert set(parts.table) == set(plan.programs) - {"mixed"}
    assert calls["mixed"] == 0 and calls["prefill"] > 0


def test_mixed_dispatches_replace_prefill_and_decode_dispatches():
    # A replica has 2 prompts of 4 samples each. The 4 sequences of the first prompt fill all slots.
    # The second has 799 keys in 13 rows, of which 8 fill a dispatch.
    # Prefill has 1,600 tokens in dispatches of 512: 4 dispatches.
    cfg = run()
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        parts = run_programs(cfg, TINY, CHIPS["cpu"].memory_bytes)
        calls = calls_per_step(cfg, parts, 4, Lengths(800, 64))
    assert (calls["prefill"], calls["mixed"], calls["decode"]) == (4 - 1, 1, 2 * 64 - 1)


@pytest.mark.parametrize(
    ("n", "slots", "prompt_len", "rows"),
    [(2, 8, 500, 2), (4, 64, 512, 2), (1, 64, 500, 8), (1, 64, 512, 32), (8, 64, 2050, 32)],
)
def test_mixed_dispatches_agree_with_the_scheduler(n, slots, prompt_len, rows):
    """Simulates responses with a mean length of 300, and dispatches that end as the engine's do."""
    n_prompts, rng = 3 * slots // n, np.random.default_rng(0)
    scheduler = Scheduler(
        PagePool(10**5, 64),
        max_num_seqs=slots,
        steps_per_dispatch=32,
        max_len=10**4,
        row_len=64,
        rows_per_dispatch=rows,
    )
    for i in range(n_prompts):
        tokens = rng.integers(0, 500, prompt_len, dtype=np.int32)
        for _ in range(n):
            scheduler.submit(Request(tokens, 1 + int(rng.exponential(300)), prompt_id=i))
    mixed = 0
    while scheduler.n_unfinished:
        plan = scheduler.plan(limit_prefill=bool(scheduler.running))
        mixed += plan.full
        seqs, n_steps = (plan.previously_running, 1) if plan.full else (plan.decode, plan.n_steps)
        left = sorted(seq.remaining for seq in seqs)
        if not plan.full and scheduler.waiting:  # until a 32nd of the slots is free
            n_steps = min(n_steps, left[max(1, len(left) // 32) - 1])
        for seq in list(seqs):
            n_new = min(n_steps, seq.remaining)
            scheduler.advance(seq, [0] * n_new, "length" if n_new == seq.remaining else "")
    counted = mixed_dispatches(n_prompts, n, slots, -(-(prompt_len - 1) // 64), rows)
    assert mixed == counted


def test_too_little_memory_is_reported_with_numbers(plan):
    machine = small_machine(2.0**20)
    parts_plan = replan(plan, machine)
    assert not parts_plan.fits and parts_plan.kv_pages == 0
    assert parts_plan.misfit.split(" needs ")[0] in plan.programs
    assert "memory_utilization=0.85" in parts_plan.misfit


def test_kv_pages_fill_the_memory_left_by_the_peak_phase(plan):
    peak = max(phase.live_bytes for phase in plan.phases.values())
    pages = 5
    memory = (peak + pages * plan.page_bytes + 1) / 0.85
    tight = replan(plan, small_machine(memory))
    assert tight.kv_pages == pages
    assert tight.max_concurrent_sequences == 4 * (
        pages // 2
    )  # 128 tokens are two pages; 4 replicas
    assert tight.expected_step_s > plan.expected_step_s  # fewer sequences at a time, more steps


def small_machine(memory_bytes: float) -> Topology:
    chip = dataclasses.replace(CHIPS["cpu"], memory_bytes=memory_bytes)
    return Topology("cpu:8", "cpu", chip, jax.devices()[:8])


def replan(plan: Plan, machine: Topology) -> Plan:
    """The same programs on another machine."""
    with jax.set_mesh(make_mesh(machine.devices, fsdp=4, tensor=2)):
        parts = run_programs(run(), TINY, plan.chip.memory_bytes)
    return assemble_plan(parts, plan.programs, machine, plan.mesh, plan.lengths)


def test_the_tables_name_programs_phases_and_verdict(plan):
    text = as_text(plan)
    for word in (*plan.programs, *plan.phases, "KV pages: 16", "fits", "AG ", "AR "):
        assert word in text, word


def test_on_several_hosts_each_process_has_its_own_engine():
    pytest.importorskip("libtpu", reason="a description of several hosts of TPUs needs libtpu")
    machine = topology("v5p:2x2x2")
    hosts = {device.process_index for device in machine.devices}
    assert len(hosts) == 2 and len(machine.devices) == 8
    found = {}
    for engines in ("auto", "mesh"):
        cfg = run(rollout__engines=engines)
        with jax.set_mesh(make_mesh(machine.devices, fsdp=4, tensor=2)):
            layout = rollout_layout(cfg, TINY, jax.numpy.dtype("bfloat16"))
            parts = run_programs(cfg, TINY, machine.chip.memory_bytes)
            found[engines] = layout.mesh(jax.sharding.get_mesh()).shape, parts.n_replicas
    # two replicas of two chips in each process, or four over all chips
    assert {name: (mesh["replica"], n) for name, (mesh, n) in found.items()} == {
        "auto": (2, 4),
        "mesh": (4, 4),
    }


def test_collectives_cost_a_ring_and_are_slower_between_nodes():
    one = Collective("all-gather", 8e9, 8, 7, 1.0, (), "")
    assert collective_seconds(one, CHIPS["h100"]) == pytest.approx(8e9 * 7 / 8 / 450e9)
    across = dataclasses.replace(one, spread=56)
    assert collective_seconds(across, CHIPS["h100"]) == pytest.approx(8e9 * 7 / 8 / 50e9)
    reduced = dataclasses.replace(one, kind="all-reduce")
    assert collective_seconds(reduced, CHIPS["v5p"]) == pytest.approx(2 * 8e9 * 7 / 8 / 180e9)


@pytest.mark.parametrize("name", ["v9z:2x4", "v5p", "h100:", "laptop"])
def test_an_unknown_topology_gets_a_list_of_examples(name):
    with pytest.raises(
        ValueError, match=r"unknown topology .*; set one of .*v5p:4x4x4.*h100:64.*cpu:8"
    ):
        topology(name)


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA B200", "b200"),
        ("TPU v4", "v4"),
        ("TPU7x", "v7x"),
    ],
)
def test_attached_devices_have_the_rates_of_their_chip(kind, chip):
    assert chip_of(kind) is CHIPS[chip]


@pytest.mark.parametrize(("name", "devices"), [("v4:2x2x1", 4), ("v7x:2x2x1", 8)])
def test_a_chip_of_v4_is_one_device_and_one_of_v7x_two(name, devices):
    pytest.importorskip("libtpu")
    assert len(topology(name).devices) == devices


def test_a_missing_compiler_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="uv pip install libtpu"):
        topology("v5e:2x4")
    with pytest.raises(ValueError, match="uv pip install jax-cuda13-plugin"):
        topology("h100:8")


def test_an_unknown_model_needs_its_config():
    assert model_shape("Qwen/Qwen2.5-7B-Instruct").D == 3584
    with pytest.raises(ValueError, match="set --model-config"):
        model_shape("unknown/model")
    with pytest.raises(ValueError, match=r"set --config\.critic\.path to that file"):
        model_shape("unknown/model", option="--config.critic.path")


@pytest.mark.thorough
def test_a_wrong_mesh_gives_a_one_line_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl.plan", "--config=configs/grpo_7b.py", "--topology=cpu:8"],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 1
    assert "needs 64 devices but there are 8" in done.stderr and "Traceback" not in done.stderr


def update_memory(config) -> tuple[int, int]:
    """(live bytes of the update, bytes of the optimizer state) of a config on one CPU device."""
    config.model.layers = "stacked"
    machine, cfg = topology("cpu:1"), resolve(config, n_devices=1)
    with jax.set_mesh(make_mesh(machine.devices)):
        parts = run_programs(cfg, model_shape(cfg.model.path), machine.chip.memory_bytes)
        for name in set(parts.table) - {"accumulate", "apply"}:
            del parts.table[name]
        programs = compile_programs(parts, Lengths(32, 32), machine)
    live = max(live_bytes(program, parts, 0) for program in programs.values())
    return live, parts.resident["opt_state"]


@pytest.mark.thorough
def test_adapters_take_at_most_60_percent_of_the_memory_and_5_of_the_optimizer_state():
    """The update of configs/quickstart_lora.py against configs/quickstart.py, by their plans."""
    live, state = update_memory(load_config("configs/quickstart_lora.py"))
    full_live, full_state = update_memory(load_config("configs/quickstart.py"))
    assert live <= 0.6 * full_live and state <= 0.05 * full_state


def test_a_plan_says_that_sparse_cores_could_run_the_collectives():
    def note(kind: str, n_devices: int = 4, **learner) -> str:
        devices = [types.SimpleNamespace(device_kind=kind)] * n_devices
        cfg = run(**{f"learner__{key}": value for key, value in learner.items()})
        return machine_note(cfg, topologies.Topology("tpu", "tpu", CHIPS["v5p"], devices))

    assert "set learner.xla=overlap" in note("TPU v5") == note("TPU v6 lite")
    assert note("TPU v5", xla=("overlap",)) == note("TPU v5", 1) == note("TPU v5 lite") == ""
