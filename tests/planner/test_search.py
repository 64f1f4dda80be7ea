"""The search ranks candidates by formulas; compiled plans decide (jaxrl/planner/search.py)."""

import dataclasses

import jax
import pytest

from jaxrl.config.checks.memory import memory_errors
from jaxrl.config.choices import REMATS, REMATS_OF_1F1B
from jaxrl.planner.plan import Plan, make_plan
from jaxrl.planner.programs import Lengths, OfflineWorkload
from jaxrl.planner.report import search_text
from jaxrl.planner.search import (
    best_of_meshes_first,
    best_rollout_tensor,
    candidates,
    estimate,
    meshes,
    offload_sets,
    rank,
    rollout_tensors,
    schedules,
    search,
    zero_levels,
)
from jaxrl.planner.sizes import Job, Settings, model_sizes
from jaxrl.planner.topology import CHIPS, Topology
from tests.planner.tiny_run import TINY, run

LENGTHS = Lengths(64, 64)
GIB = 2**30
OFFLOADS = {
    (),
    ("optimizer",),
    ("optimizer", "reference"),
    ("optimizer", "gradients", "reference"),
    ("policy",),
    ("optimizer", "reference", "policy"),
    ("optimizer", "gradients", "reference", "policy"),
}


def machine(memory_bytes: float = float(GIB)) -> Topology:
    chip = dataclasses.replace(CHIPS["cpu"], memory_bytes=memory_bytes)
    return Topology("cpu:8", "cpu", chip, jax.devices()[:8])


def job(cfg=None, model=TINY, where=None, **changes) -> Job:
    return Job(cfg or run(), model, where or machine(), LENGTHS, **changes)


def test_candidates_are_the_meshes_that_divide_the_model():
    found = list(candidates(job()))
    # 2 KV heads: tensor 1 or 2; four token budgets; remat policies; sets of offloads
    n = 4 * len(REMATS) * len(OFFLOADS)
    assert [c.mesh for c in found[::n]] == [dict(fsdp=8), dict(fsdp=4, tensor=2)]
    assert {c.token_budget for c in found} == {128, 256, 512, 1024}
    assert {c.offload for c in found} == OFFLOADS
    assert len(found) == 2 * n


def test_estimated_memory_follows_the_remat_policy():
    def bytes_of(remat: str, tokens: int = 1024, tensor: int = 1) -> float:
        sizes = {"fsdp": 8 // tensor, "tensor": tensor}
        return estimate(job(), Settings(sizes, tokens, remat)).bytes

    order = ("offload", "full", "attention", "mlp", "dots", "none")
    found = [bytes_of(remat) for remat in order]
    assert found == sorted(found)
    assert len(set(found[1:])) == 5  # of two layers, both inputs are on the device at a time
    assert bytes_of("full", 128) < bytes_of("full", 1024)
    assert bytes_of("full") < bytes_of("full?first=1") < bytes_of("none")


def test_estimates_include_mlp_chunks():
    """Chunks of 256 of 1,024 tokens: 3/4 of 4 x 3 F numbers less, and float32 sums more."""

    float32 = job(run(model__dtype="float32"))

    def of(remat: str, chunk: int = 0):
        return estimate(float32, Settings({"fsdp": 8}, 1024, remat, mlp_chunk=chunk))

    whole, chunked = of("full"), of("full", 256)
    absent, sums = 4 * 768 * 4 * 3 * 128, 4 * 3 * 128 * 64
    assert whole.bytes - chunked.bytes == pytest.approx(absent - sums)
    assert chunked.step_s > whole.step_s
    assert of("none", 256).bytes < of("none").bytes
    recomputed = of("none", 256).step_s - of("none").step_s
    assert recomputed > chunked.step_s - whole.step_s


def test_long_rows_are_tried_with_mlps_in_chunks():
    long = run(learner__token_budget=8192, learner__buckets=(8192,))
    found = {(c.token_budget, c.mlp_chunk) for c in candidates(job(long))}
    assert {chunk for tokens, chunk in found if tokens == 8192} == {0, 4096}
    chosen = run(learner__token_budget=8192, learner__buckets=(8192,), learner__mlp_chunk=1024)
    chunked = next(candidates(job(chosen)))
    assert chunked.apply(chosen).learner.mlp_chunk == 1024
    assert "--config.learner.mlp_chunk=1024" in chunked.overrides


def test_tensor_parallelism_shards_the_estimated_residual_stream():
    """The inputs of two layers, 64 features of 1,024 tokens in float32, over two devices."""

    def bytes_of(**changes) -> float:
        cfg = run(model__dtype="float32", **changes)
        return estimate(job(cfg), Settings({"fsdp": 4, "tensor": 2}, 1024, "full")).bytes

    saved = bytes_of(learner__shard_residual=False) - bytes_of()
    assert saved == pytest.approx(2 * 1024 * 64 * 4 / 2)


def test_the_estimated_time_follows_what_is_recomputed_and_copied():
    def seconds(remat: str) -> float:
        return estimate(job(), Settings({"fsdp": 8}, 1024, remat)).step_s

    order = ("none", "dots", "mlp", "attention", "full", "offload")
    found = [seconds(remat) for remat in order]
    assert found == sorted(set(found))
    assert seconds("none") < seconds("full?first=1") < seconds("full") < seconds("full?group=2")
    # half as many inputs are copied, and every layer is recomputed twice
    assert seconds("full?group=2") < seconds("offload?group=2")


def test_meshes_depend_on_model_row_length_and_network():
    experts = dataclasses.replace(
        TINY, family="qwen3_moe", qkv_bias=False, E=8, top_k=2, F_expert=64
    )
    cfg = run()
    long = dataclasses.replace(
        cfg, learner=dataclasses.replace(cfg.learner, token_budget=4096, buckets=(4096,))
    )
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))

    def sizes(cfg, model, where, axis) -> set[int]:
        return {mesh[axis] for mesh in meshes(job(cfg, model, where))}

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
    assert sizes(cfg, dataclasses.replace(TINY, L=3), nodes, "stage") == {1}
    assert sizes(run(model__layers="list"), TINY, nodes, "stage") == {1}


def test_pipelines_have_rows_for_every_stage_and_both_schedules():
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))
    cfg = run()
    staged = [c for c in candidates(job(cfg, where=nodes)) if c.mesh.get("stage") == 2]
    assert {c.token_budget for c in staged} == {4 * 128, 8 * 128, 16 * 128}
    assert {c.remat for c in staged if c.pipeline_schedule == "gpipe"} == set(REMATS)
    assert {c.remat for c in staged if c.pipeline_schedule == "1f1b"} == set(REMATS_OF_1F1B)
    chosen = next(c for c in staged if c.pipeline_schedule == "1f1b")
    assert "--config.mesh.stage=2" in chosen.overrides
    assert "--config.learner.pipeline_schedule=1f1b" in chosen.overrides
    applied = chosen.apply(cfg)
    assert applied.mesh.stage == 2 and applied.learner.pipeline_schedule == "1f1b"


def test_interleaved_pipelines_have_chunks_that_divide_the_layers():
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))
    cfg, deep = run(), dataclasses.replace(TINY, L=8)
    every = [c for c in candidates(job(cfg, deep, where=nodes)) if c.mesh.get("stage") == 2]
    found = [c for c in every if c.pipeline_schedule == "interleaved"]
    assert {c.pipeline_chunks for c in found} == {2, 4}
    assert {c.remat for c in found} == set(REMATS_OF_1F1B)
    assert {c.pipeline_chunks for c in every if c not in found} == {1}
    assert "--config.learner.pipeline_chunks=2 --config.learner.halvings=0" in found[0].overrides
    applied = found[0].apply(cfg)
    assert applied.learner.pipeline_chunks == 2 and applied.learner.halvings == 0
    with_four_layers = job(cfg, dataclasses.replace(TINY, L=4), where=nodes)
    assert list(schedules(with_four_layers, 2)) == [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]
    assert list(schedules(with_four_layers, 1)) == [("gpipe", 1)]


def test_chunks_shorten_the_idle_time_of_the_estimate():
    """By hand: 4 rows in two stages of 4 layers take the time of 5 rows, with 2 chunks of 4.5.

    Backward keeps 3 rows of 4 layers, or 5 passes of 2 layers.
    """
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))
    planned = job(run(model__dtype="float32"), dataclasses.replace(TINY, L=8), where=nodes)
    mesh, sizes = dict(stage=2, fsdp=8), []
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2)):
        settings = Settings(mesh, 512, "full", pipeline_schedule=schedule, pipeline_chunks=chunks)
        sizes.append(model_sizes(planned, "policy", settings))
    assert [size.calls for size in sizes] == [5, 4.5]
    assert [size.kept_calls * size.n_layers for size in sizes] == [12, 10]


def test_a_pipeline_is_estimated_by_its_ticks():
    """By hand: two stages of one layer, rows of 128 tokens, 4 or 8 of them in 5 or 9 ticks."""
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))
    planned = job(run(model__dtype="float32", data__prompts_per_step=64), where=nodes)

    def of(rows: int, schedule: str = "gpipe"):
        mesh = dict(stage=2, fsdp=8)
        return estimate(planned, Settings(mesh, rows * 128, "full", pipeline_schedule=schedule))

    array = 128 * 64 * 4
    # per tick the input of the layer, and the row before and after the stages
    assert of(8).bytes - of(4).bytes == pytest.approx(4 * 3 * array)
    assert of(8, "1f1b").bytes - of(4, "1f1b").bytes == pytest.approx(4 * 2 * array)
    # a stage has half of the layers; embeddings are on both
    params, ends = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 64 + 2 * 32 + 2 * 64 + 3 * 128 * 64), 256 * 64
    sizes = model_sizes(planned, "policy", Settings(dict(stage=2, fsdp=8), 512, "full"))
    assert sizes.held == pytest.approx((params / 2 + ends + 64) / 8, rel=0.01)
    # idle ticks: 5 for 4 rows take longer than 9 for 8
    assert of(4).step_s > of(8).step_s


@pytest.mark.parametrize(
    ("max_num_seqs", "memory_bytes", "tensor"),
    [
        (8, GIB, 2),  # both hold all 32 sequences at a time; 2 reads half of the weights per step
        (4, GIB, 1),  # 4 replicas of 2 devices hold half of the sequences: as fast as 8 of 1
        (4, 300_000, 2),  # half of the memory holds half of the weights, 200 kB, not all
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
    assert ("--config.rollout.tensor=2" in chosen.overrides) == (tensor == 2)


def test_a_tensor_axis_of_the_rollout_in_the_config_is_kept():
    assert rollout_tensors(job(run(rollout__tensor=2))) == (2,)
    assert rollout_tensors(job(run(rollout__layout="training"))) == ()
    assert best_rollout_tensor(job(), dict(fsdp=8, expert=1), ()) == 0
    sft = OfflineWorkload(responses_per_example=1, scores_policy=False, has_reference=False)
    assert rollout_tensors(job(workload=sft)) == ()


def test_plans_that_fit_are_ranked_with_kernels_one_after_the_other():
    def found(*, fits: bool, serial_step_s: float, expected_step_s: float) -> Plan:
        plan = object.__new__(Plan)  # only what the order depends on
        times = dict(serial_step_s=serial_step_s, expected_step_s=expected_step_s)
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


def test_estimates_include_offload_and_slow_networks():
    def estimated(mesh: dict, where: Topology, offload=()):
        return estimate(job(where=where), Settings(mesh, 128, "full", offload))

    both = ("optimizer", "reference")
    kept, waiting = estimated(dict(fsdp=8), machine()), estimated(dict(fsdp=8), machine(), both)
    assert waiting.bytes < kept.bytes and waiting.step_s > kept.step_s
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))
    # weights gathered between nodes for every layer, against gradients summed between them
    assert estimated(dict(fsdp=8, replica=2), nodes).step_s < estimated(dict(fsdp=16), nodes).step_s


def test_replicas_may_share_optimizer_state_and_gradients():
    """By hand: AdamW's 8 bytes per float32 parameter, then 4 of its gradient, over two replicas."""
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))
    mesh, cfg = dict(fsdp=8, replica=2), run(model__dtype="float32")
    planned = job(cfg, where=nodes)
    assert zero_levels(planned, mesh) == (0, 1, 2)
    assert zero_levels(planned, dict(fsdp=16, replica=1)) == (0,)
    assert zero_levels(job(cfg, dataclasses.replace(TINY, D=72), nodes), mesh) == (0,)
    none, state, both = (
        estimate(planned, Settings(mesh, 128, "full", zero=level)) for level in (0, 1, 2)
    )
    params = 256 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 64 + 2 * 32 + 2 * 64 + 3 * 128 * 64) + 64
    assert none.bytes - state.bytes == pytest.approx(8 * params / 8 / 2, rel=0.01)
    assert state.bytes - both.bytes == pytest.approx(4 * params / 8 / 2, rel=0.01)
    assert none.step_s < state.step_s == both.step_s
    assert both.overrides.endswith("--config.learner.zero=2")
    assert both.apply(cfg).learner.zero == 2


SMALL = dataclasses.replace(TINY, D=32, N=4, K=4, H=8, F=64)
MESH = Settings({"fsdp": 8}, 256, "full")


@pytest.mark.parametrize(
    ("changes", "role"),
    [
        (dict(algorithm__advantage="gae", critic__path="critic"), "critic"),
        (dict(algorithm__teacher="teacher"), "teacher"),
        (dict(reward_model__path="judge"), "reward_model"),
    ],
)
def test_estimates_include_the_model_of_a_role(changes, role):
    """The larger the model of the role, the more memory and time; others have no effect."""
    cfg = run(**changes)
    without = estimate(job(run()), MESH)
    small, large = (
        estimate(job(cfg, role_decoders={role: model}), MESH)
        for model in (SMALL, dataclasses.replace(TINY, L=8))
    )
    assert small.bytes < large.bytes and small.step_s < large.step_s
    assert large.bytes > without.bytes and large.step_s > without.step_s
    unused = estimate(job(run(), role_decoders={role: SMALL}), MESH)
    assert unused.bytes == without.bytes or role == "teacher"


def test_estimated_state_of_a_critic_is_counted_by_hand():
    """Weights, two moments in float32, sharded over 8 devices; no gradients beyond the policy's."""
    cfg = run(algorithm__advantage="gae", critic__path="critic")
    critic = estimate(job(cfg, role_decoders={"critic": TINY}), MESH)
    rest = estimate(job(run()), MESH)
    # V*D + L * (q, o: 2 * 64*64, k, v: 2 * 32*64, biases, norms, mlp: 3 * 128*64) + norm
    params = 256 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 64 + 2 * 32 + 2 * 64 + 3 * 128 * 64) + 64
    assert critic.bytes - rest.bytes == pytest.approx(3 * 4 * params / 8, rel=0.01)


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
    assert "release_kv" not in kept.overrides
    assert "--config.learner.offload=policy" in offloaded.overrides
    assert "--config.rollout.release_kv=True" in offloaded.overrides
    chosen = offloaded.apply(run())
    assert chosen.rollout.release_kv and chosen.learner.offload == ("policy",)
    assert not memory_errors(chosen)


def test_gradients_in_host_memory_are_the_last_resort():
    """Less memory than with the optimizer there alone, for more time per step."""
    kept, less, least = (
        estimate(job(), dataclasses.replace(MESH, offload=offload))
        for offload in ((), ("optimizer",), ("optimizer", "gradients"))
    )
    assert least.bytes < less.bytes < kept.bytes
    assert least.step_s > less.step_s > kept.step_s


def test_offline_jobs_have_no_rollout():
    def seconds(workload: OfflineWorkload | None) -> float:
        return estimate(job(run(algorithm__kl_coef=0.0), workload=workload), MESH).step_s

    sft = OfflineWorkload(responses_per_example=1, scores_policy=False, has_reference=False)
    dpo = OfflineWorkload(responses_per_example=2, scores_policy=True, has_reference=True)
    pairs = dataclasses.replace(dpo, scores_policy=False, has_reference=False)
    # 8 or 16 sequences of 128 tokens on 8 ranks of 256 tokens: one micro-batch
    assert seconds(sft) == seconds(pairs) < seconds(dpo) < seconds(None)
    found = list(candidates(job(run(algorithm__kl_coef=0.0), workload=dpo)))
    assert {c.offload for c in found} == {roles for roles in OFFLOADS if "policy" not in roles}


@pytest.mark.thorough
def test_estimated_memory_agrees_with_the_compiled_plan():
    """The state of a larger model dominates: weights, moments, gradients and reference."""
    model = dataclasses.replace(TINY, D=256, F=1024, V=1024)
    cfg = run()
    plan = make_plan(cfg, model, machine(), lengths=LENGTHS)
    live = max(phase.live_bytes for phase in plan.phases.values())
    formula = estimate(job(cfg, model), Settings({"fsdp": 4, "tensor": 2}, 256, "full"))
    assert 0.4 * live < formula.bytes < 2.5 * live


@pytest.mark.slow
def test_the_fastest_candidate_that_fits_is_reported_with_its_keys():
    found = search(job(), finalists=2)
    plans = [plan for _, plan in found if plan is not None]
    assert plans[0].fits and plans[0].serial_step_s <= plans[1].serial_step_s
    text = search_text(found)
    assert "time with kernels one after the other, time at peak rates" in text
    assert "--config.mesh.fsdp=" in text and "cheapest that fits: --config.mesh" in text


def test_the_best_of_every_mesh_is_compiled_before_its_other_settings():
    def entry(step_s: float, **mesh: int):
        found = estimate(job(), Settings(mesh, 128, "full"))
        return dataclasses.replace(found, step_s=step_s)

    a, b, c, d, slow = (
        entry(1.0, fsdp=8),
        entry(1.01, fsdp=8),
        entry(1.02, fsdp=4, tensor=2),
        entry(1.03, fsdp=4, tensor=2),
        entry(1.2, tensor=8),
    )
    assert best_of_meshes_first([a, b, c, d, slow]) == [a, c, b, d, slow]


def test_too_little_memory_is_reported_with_numbers():
    with pytest.raises(
        ValueError, match=r"it needs at least .* GiB per device of .*; use more devices"
    ):
        search(job(where=machine(1024.0)))
