"""The search ranks candidates by formulas; compiled plans decide (jaxrl/planner/search.py)."""

import dataclasses

import jax
import pytest

from jaxrl.config.choices import REMATS
from jaxrl.planner.estimate import Job, Settings
from jaxrl.planner.plan import make_plan
from jaxrl.planner.programs import Lengths, OfflineWorkload
from jaxrl.planner.report import search_text
from jaxrl.planner.search import candidates, estimate, meshes, search
from jaxrl.planner.topology import CHIPS, Topology
from tests.planner.tiny_run import TINY, run

LENGTHS = Lengths(64, 64)
GIB = 2**30


def machine(memory_bytes: float = float(GIB)) -> Topology:
    chip = dataclasses.replace(CHIPS["cpu"], memory_bytes=memory_bytes)
    return Topology("cpu:8", "cpu", chip, jax.devices()[:8])


def job(cfg=None, model=TINY, where=None, **changes) -> Job:
    return Job(cfg or run(), model, where or machine(), LENGTHS, **changes)


def test_candidates_are_the_meshes_that_divide_the_model():
    found = list(candidates(job()))
    # 2 KV heads: tensor 1 or 2; four token budgets; the remat policies; none, one or both offloaded
    n = 4 * len(REMATS) * 3
    assert [c.mesh for c in found[::n]] == [dict(fsdp=8), dict(fsdp=4, tensor=2)]
    assert {c.token_budget for c in found} == {128, 256, 512, 1024}
    assert {c.offload for c in found} == {(), ("optimizer",), ("optimizer", "reference")}
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


def test_estimates_include_offload_and_slow_networks():
    def estimated(mesh: dict, where: Topology, offload=()):
        return estimate(job(where=where), Settings(mesh, 128, "full", offload))

    both = ("optimizer", "reference")
    kept, waiting = estimated(dict(fsdp=8), machine()), estimated(dict(fsdp=8), machine(), both)
    assert waiting.bytes < kept.bytes and waiting.step_s > kept.step_s
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))
    # weights gathered between nodes for every layer, against gradients summed between them
    assert estimated(dict(fsdp=8, replica=2), nodes).step_s < estimated(dict(fsdp=16), nodes).step_s


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
    }


def test_offline_jobs_have_no_rollout():
    def seconds(workload: OfflineWorkload | None) -> float:
        return estimate(job(run(algorithm__kl_coef=0.0), workload=workload), MESH).step_s

    sft = OfflineWorkload(responses_per_example=1, scores_policy=False, has_reference=False)
    dpo = OfflineWorkload(responses_per_example=2, scores_policy=True, has_reference=True)
    pairs = dataclasses.replace(dpo, scores_policy=False, has_reference=False)
    # 8 or 16 sequences of 128 tokens on 8 ranks of 256 tokens: one micro-batch
    assert seconds(sft) == seconds(pairs) < seconds(dpo) < seconds(None)
    found = list(candidates(job(run(algorithm__kl_coef=0.0), workload=dpo)))
    assert {c.offload for c in found} == {(), ("optimizer",), ("optimizer", "reference")}


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
    assert plans[0].fits and plans[0].expected_step_s <= plans[1].expected_step_s
    text = search_text(found)
    assert "--config.mesh.fsdp=" in text and "cheapest that fits: --config.mesh" in text


def test_too_little_memory_is_reported_with_numbers():
    with pytest.raises(
        ValueError, match=r"it needs at least .* GiB per device of .*; use more devices"
    ):
        search(job(where=machine(1024.0)))
