"""The formulas for memory and time, by hand and by their order (jaxrl/planner/estimate.py)."""

import dataclasses

import jax
import pytest

from jaxrl.models.config import MLPConfig
from jaxrl.models.state_mixers import GatedDeltaNetConfig
from jaxrl.planner.chips import CHIPS
from jaxrl.planner.estimate import (
    estimate_memory,
    free_bytes,
    kept_features,
    rollout_seconds,
)
from jaxrl.planner.plan import make_plan
from jaxrl.planner.programs import OfflineWorkload, run_programs
from jaxrl.planner.search import (
    candidates,
    estimate,
    zero_levels,
)
from jaxrl.planner.sizes import CandidateSettings, model_sizes
from jaxrl.planner.topology import Topology
from sharding import make_mesh
from tests.models.resized import resized
from tests.planner.tiny_job import GIB, LENGTHS, MESH, OFFLOADS, SMALL, job, machine
from tests.planner.tiny_run import JUDGE, TINY, run


def test_estimated_memory_follows_the_remat_policy():
    def bytes_of(remat: str, tokens: int = 1024, tensor: int = 1) -> float:
        sizes = {"fsdp": 8 // tensor, "tensor": tensor}
        return estimate(job(), CandidateSettings(sizes, tokens, remat)).bytes

    order = ("offload", "full", "attention", "mlp", "dots", "none")
    found = [bytes_of(remat) for remat in order]
    assert found == sorted(found)
    assert len(set(found[1:])) == 5  # of two layers, both inputs are on the device at a time
    assert bytes_of("full", 128) < bytes_of("full", 1024)
    assert bytes_of("full") < bytes_of("full?first=1") < bytes_of("none")


def test_estimates_include_mlp_chunks():
    """Chunks of 256 of 1,024 tokens: 3/4 of 2.5 x 3 F numbers less, and float32 sums more."""

    float32 = job(run(model__dtype="float32"))

    def of(remat: str, chunk: int = 0):
        return estimate(float32, CandidateSettings({"fsdp": 8}, 1024, remat, mlp_chunk=chunk))

    whole, chunked = of("full"), of("full", 256)
    absent, sums = 2.5 * 768 * 4 * 3 * 128, 4 * 3 * 128 * 64
    assert whole.bytes - chunked.bytes == pytest.approx(absent - sums)
    assert chunked.step_s > whole.step_s
    assert of("none", 256).bytes < of("none").bytes
    recomputed = of("none", 256).step_s - of("none").step_s
    assert recomputed > chunked.step_s - whole.step_s


@pytest.mark.parametrize("quantized", [{"rollout__dtype": "int8"}, {"lora__base_dtype": "int8"}])
def test_the_engines_copy_is_as_small_as_its_dtype(quantized):
    """By hand: a byte, not four, of the layers' matrices, and float32 scales of outputs."""
    lora = dict(lora__rank=4, algorithm__correction="token_tis")
    whole, small = (job(run(**lora, **changes)) for changes in ({}, quantized))
    copies = [model_sizes(one, "policy", MESH) for one in (whole, small)]
    sizes = [sizes.rollout_copy * sizes.rollout_bytes for sizes in copies]
    mixer = 64 * 64 * 2 + 64 * 32 * 2
    outputs = (64 + 2 * 32 + 64) + (2 * 128 + 64)
    saved = TINY.L * (3 * (mixer + 3 * 64 * 128) - 4 * outputs)
    assert sizes[0] - sizes[1] == pytest.approx(saved)
    memory = [estimate_memory(one, MESH).rollout for one in (whole, small)]
    held = [sizes.held_bytes for sizes in copies]
    assert memory[0] - memory[1] == pytest.approx(saved + held[0] - held[1])
    assert rollout_seconds(small, copies[1], 1e9) < rollout_seconds(whole, copies[0], 1e9)


def test_adapters_are_sharded_along_one_side_only():
    """Rank 4, fsdp 4 x tensor 2. By hand, per layer: A of q, k, v, gate and up is over fsdp,
    A of o and down over tensor; B of the former over tensor, B of the latter over fsdp."""
    adapted = job(run(lora__rank=4))
    mesh = CandidateSettings({"fsdp": 4, "tensor": 2}, 256, "full")
    sizes = model_sizes(adapted, "policy", mesh)
    a = 5 * 64 // 4 + 64 // 2 + 128 // 2
    b = (64 + 2 * 32 + 2 * 128) // 2 + 2 * 64 // 4
    assert sizes.trained == sizes.adapters == TINY.L * 4 * (a + b)
    assert sizes.gradient_bytes == 4 * sizes.trained
    assert sizes.optimizer_bytes / sizes.trained == pytest.approx(8, rel=1e-3)  # two moments
    whole = model_sizes(job(), "policy", mesh)
    assert whole.adapters == 0 and whole.trained == whole.held
    base = sizes.held * sizes.stored_bytes
    assert sizes.held_bytes - base == sizes.adapters * sizes.item_bytes


def test_a_tpu_moves_float32_arrays_of_weights_in_nf4():
    """20 bytes for each parameter of a replica, in every decode step; a GPU and int8 do not."""

    def expanded_s(chip: str, base: str) -> tuple[float, float]:
        """Seconds of 64 decode steps without the stored weights; those of 20 bytes each."""
        kind = "tpu" if chip == "v5e" else "gpu"
        where = Topology(chip, kind, CHIPS[chip], list(range(8)))
        cfg = run(lora__rank=4, lora__base_dtype=base, algorithm__correction="token_tis")
        one = job(cfg, where=where)
        sizes, rate = model_sizes(one, "policy", MESH), CHIPS[chip].memory_bytes_per_s
        read = 64 * sizes.rollout_copy * sizes.rollout_bytes / rate
        return rollout_seconds(one, sizes, 1e9) - read, 64 * 20 * sizes.rollout_copy / rate

    expanded, by_hand = expanded_s("v5e", "nf4")
    assert expanded - expanded_s("v5e", "int8")[0] == pytest.approx(by_hand)
    assert expanded_s("h100", "nf4")[0] == pytest.approx(expanded_s("h100", "int8")[0])


def test_a_list_of_layers_keeps_fewer_arrays():
    """By hand: three times the inputs and outputs of a layer's products, or once."""
    sizes = dict(tensor=1, expert=1, stream=64)
    stacked, listed = (kept_features(TINY, stacked=stacked, **sizes) for stacked in (True, False))
    products = 2 * 64 + 2 * (64 + 32) + 3 * 128
    assert listed["none"] == 64 + products and stacked["none"] == 64 + 3 * products
    # inputs of attention and MLP, q, k, v, the output of attention, gate and up
    assert listed["dots"] == stacked["dots"] == 64 + 64 + 64 + 2 * 32 + 64 + 2 * 128


def test_an_mlp_without_a_gate_keeps_one_array_less():
    """By hand, 128 wide: up and its activation, not gate, up and their product."""
    mlp = MLPConfig(128, gated=False)
    layers = tuple(dataclasses.replace(layer, ffn=mlp) for layer in TINY.layers)
    how = dict(tensor=1, expert=1, stream=64, stacked=False)
    gated = kept_features(TINY, **how)
    plain = kept_features(dataclasses.replace(TINY, layers=layers), **how)
    assert plain == gated | {name: gated[name] - 128 for name in ("mlp", "dots", "none")}
    outside = 64 + 2 * 64 + 2 * (64 + 32)  # the layer's input, inputs of products, heads
    assert plain["none"] == outside + 2 * 128


def test_the_estimated_rollout_waits_for_kv_pages():
    """By hand: 32 sequences on 8 devices, of 4 at a time, or of 2 if no more pages fit."""
    planned = job(run(rollout__max_num_seqs=8))
    sizes = model_sizes(planned, "policy", MESH)
    assert sizes.sequence_bytes == 2 * 2 * 2 * 16 * 4 * (2 * 64)  # K, V; layers; heads of 16
    read = sizes.rollout_copy * sizes.item_bytes
    rate = planned.machine.chip.memory_bytes_per_s

    def seconds(n_fitting: int) -> float:
        return rollout_seconds(planned, sizes, n_fitting * sizes.sequence_bytes)

    filled = (64 + 64) / planned.cfg.data.max_len * sizes.sequence_bytes
    assert seconds(100) == seconds(4) == pytest.approx(64 * (read + 4 * filled) / rate)
    assert seconds(3) == pytest.approx(2 * 64 * (read + 3 * filled) / rate)
    assert seconds(2) == pytest.approx(2 * 64 * (read + 2 * filled) / rate)
    assert seconds(-1) == seconds(1) == pytest.approx(4 * 64 * (read + filled) / rate)
    # With states: 1 + 8 + 4 slots next to the pages; a step reads and writes one per sequence.
    delta = dataclasses.replace(TINY.layers[0], mixer=GatedDeltaNetConfig(K=1, N=1, D=8, V=8))
    decoder = dataclasses.replace(TINY, layers=(delta, *TINY.layers))
    slot = sizes.sequence_bytes
    sizes = dataclasses.replace(sizes, decoder=decoder, slot_bytes=slot)
    assert seconds(13 + 2) == pytest.approx(2 * 64 * (read + 2 * (filled + 2 * slot)) / rate)


def test_released_kv_pages_have_the_memory_of_training():
    memory = estimate_memory(job(), MESH)
    usable = 0.85 * GIB
    assert free_bytes(job(), MESH, memory) == pytest.approx(usable - memory.peak)
    released = job(run(rollout__release_kv=True))
    assert free_bytes(released, MESH, memory) == pytest.approx(usable - memory.rollout)
    assert memory.rollout < memory.update


def test_gradients_are_reduced_while_kernels_run_except_without_sparse_cores():
    def seconds(chip: str, **changes) -> float:
        where = Topology(chip, "tpu", CHIPS[chip], list(range(8)))
        large = CandidateSettings(
            {"fsdp": 8}, 2**16, "full"
        )  # kernels take longer than collectives
        return estimate(job(run(**changes), where=where), large).step_s

    overlap = dict(learner__xla=("overlap",))
    assert seconds("v5p", **overlap) < seconds("v5p")
    assert seconds("v5e", **overlap) == seconds("v5e")


def test_tensor_parallelism_shards_the_estimated_residual_stream():
    """The inputs of two layers, 64 features of 1,024 tokens in float32, over two devices."""

    def bytes_of(**changes) -> float:
        cfg = run(model__dtype="float32", **changes)
        return estimate(job(cfg), CandidateSettings({"fsdp": 4, "tensor": 2}, 1024, "full")).bytes

    saved = bytes_of(learner__shard_residual=False) - bytes_of()
    assert saved == pytest.approx(2 * 1024 * 64 * 4 / 2)


def test_the_estimated_time_follows_what_is_recomputed_and_copied():
    def seconds(remat: str) -> float:
        return estimate(job(), CandidateSettings({"fsdp": 8}, 1024, remat)).step_s

    order = ("none", "dots", "mlp", "attention", "full", "offload")
    found = [seconds(remat) for remat in order]
    assert found == sorted(set(found))
    assert seconds("none") < seconds("full?first=1") < seconds("full") < seconds("full?group=2")
    # half as many inputs are copied, and every layer is recomputed twice
    assert seconds("full?group=2") < seconds("offload?group=2")


def test_a_pipeline_is_estimated_by_its_ticks():
    """By hand: two stages of one layer, rows of 128 tokens, 4 or 8 of them in 5 or 9 ticks."""
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))
    planned = job(run(model__dtype="float32", data__prompts_per_step=64), where=nodes)

    def of(rows: int, schedule: str = "gpipe"):
        mesh = dict(stage=2, fsdp=8)
        return estimate(
            planned, CandidateSettings(mesh, rows * 128, "full", pipeline_schedule=schedule)
        )

    array = 128 * 64 * 4
    # per tick the input of the layer, and the row before and after the stages
    assert of(8).bytes - of(4).bytes == pytest.approx(4 * 3 * array)
    assert of(8, "1f1b").bytes - of(4, "1f1b").bytes == pytest.approx(4 * 2 * array)
    # a stage has half of the layers; embeddings are on both
    params, ends = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 64 + 2 * 32 + 2 * 64 + 3 * 128 * 64), 256 * 64
    sizes = model_sizes(planned, "policy", CandidateSettings(dict(stage=2, fsdp=8), 512, "full"))
    assert sizes.held == pytest.approx((params / 2 + ends + 64) / 8, rel=0.01)
    # idle ticks: 5 for 4 rows take longer than 9 for 8
    assert of(4).step_s > of(8).step_s


def test_estimates_include_offload_and_slow_networks():
    def estimated(mesh: dict, where: Topology, offload=()):
        return estimate(job(where=where), CandidateSettings(mesh, 128, "full", offload))

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
        estimate(planned, CandidateSettings(mesh, 128, "full", zero=level)) for level in (0, 1, 2)
    )
    params = 256 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 64 + 2 * 32 + 2 * 64 + 3 * 128 * 64) + 64
    assert none.bytes - state.bytes == pytest.approx(8 * params / 8 / 2, rel=0.01)
    assert state.bytes - both.bytes == pytest.approx(4 * params / 8 / 2, rel=0.01)
    assert none.step_s < state.step_s == both.step_s
    shared = dataclasses.replace(cfg, learner=dataclasses.replace(cfg.learner, zero=2))
    of_config = estimate(job(shared, where=nodes), CandidateSettings(mesh, 128, "full", zero=2))
    assert of_config.bytes == both.bytes
    assert both.overrides(cfg).endswith("--config.learner.zero=2")
    assert both.apply(cfg).learner.zero == 2


@pytest.mark.parametrize(
    ("changes", "role"),
    [
        (dict(algorithm__advantage="gae", critic__path="critic"), "critic"),
        (dict(algorithm__teacher="teacher"), "teacher"),
        (dict(reward_model__path="scorer"), "reward_model"),
        (JUDGE, "judge"),
    ],
)
def test_estimates_include_the_model_of_a_role(changes, role):
    """The larger the model of the role, the more memory and time; others have no effect."""
    cfg = run(**changes)
    without = estimate(job(run()), MESH)
    small, large = (
        estimate(job(cfg, role_decoders={role: model}), MESH)
        for model in (SMALL, resized(TINY, L=8))
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


def test_further_teachers_take_more_memory_and_score_in_turn():
    """Each teacher is another copy; two read the responses in the time of one."""
    two = run(algorithm__teacher="a", algorithm__more_teachers=("b?source=x", "http://c?source=y"))
    models = {"teacher": TINY, "teacher_2": SMALL}
    one = estimate(job(run(algorithm__teacher="a"), role_decoders={"teacher": TINY}), MESH)
    both = estimate(job(two, role_decoders=models), MESH)
    held = model_sizes(job(two, role_decoders=models), "teacher_2", MESH).held_bytes
    assert both.bytes - one.bytes == pytest.approx(held) and held > 0
    assert both.step_s < one.step_s  # the smaller one reads half of the responses
    with jax.set_mesh(make_mesh(jax.devices()[:8], fsdp=8)):
        offloaded = run(
            algorithm__teacher="a",
            algorithm__more_teachers=("b?source=x",),
            learner__offload=("reference",),
        )
        programs = run_programs(offloaded, TINY, GIB, models)
    assert programs.resident["ref_2"] < programs.resident["ref"]
    assert programs.host_resident["ref_2"] == programs.resident["ref_2"]
    # One teacher at a time is on the devices, and none in other programs
    state = {name: set(programs.table[name].counted_state) for name in programs.table}
    assert state["reference"] == state["reference_2"] == {"ref", "ref_2"}
    assert {"ref", "ref_2"} <= state["accumulate"]


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
    model = resized(TINY, D=256, F=1024, V=1024)
    cfg = run()
    plan = make_plan(cfg, model, machine(), lengths=LENGTHS)
    live = max(phase.live_bytes for phase in plan.phases.values())
    formula = estimate(job(cfg, model), CandidateSettings({"fsdp": 4, "tensor": 2}, 256, "full"))
    assert 0.4 * live < formula.bytes < 2.5 * live
