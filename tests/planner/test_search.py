"""The search ranks candidates by formulas; compiled plans decide (jaxrl/planner/search.py)."""

import dataclasses

import jax
import pytest

from jaxrl.planner.plan import make_plan
from jaxrl.planner.programs import Lengths
from jaxrl.planner.report import search_text
from jaxrl.planner.search import candidates, estimate, meshes, search
from jaxrl.planner.topology import CHIPS, Topology
from tests.planner.tiny_run import TINY, run

LENGTHS = Lengths(64, 64)
GIB = 2**30


def machine(memory_bytes: float = float(GIB)) -> Topology:
    chip = dataclasses.replace(CHIPS["cpu"], memory_bytes=memory_bytes)
    return Topology("cpu:8", "cpu", chip, jax.devices()[:8])


def test_candidates_are_the_meshes_that_divide_the_model():
    found = list(candidates(run(), TINY, machine(), LENGTHS))
    # 2 KV heads: tensor 1 or 2; four token budgets; four remat policies; with or without offload
    assert [c.mesh for c in found[:: 4 * 4 * 2]] == [dict(fsdp=8), dict(fsdp=4, tensor=2)]
    assert {c.token_budget for c in found} == {128, 256, 512, 1024}
    assert {c.offload for c in found} == {(), ("optimizer", "reference")}
    assert len(found) == 2 * 4 * 4 * 2


def test_estimated_memory_follows_the_remat_policy():
    def bytes_of(remat: str, tokens: int = 1024, tensor: int = 1) -> float:
        sizes = {"fsdp": 8 // tensor, "tensor": tensor}
        return estimate(run(), TINY, machine(), LENGTHS, sizes, tokens, remat).bytes

    assert bytes_of("full") < bytes_of("mlp") < bytes_of("dots") < bytes_of("none")
    assert bytes_of("full", 128) < bytes_of("full", 1024)


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
        return {mesh[axis] for mesh in meshes(cfg, model, where)}

    assert sizes(cfg, TINY, machine(), "expert") == {1}
    assert sizes(cfg, experts, machine(), "expert") == {1, 2, 4, 8}
    assert sizes(cfg, TINY, machine(), "sequence") == {1}
    assert sizes(long, TINY, machine(), "sequence") == {1, 2}  # 2048 tokens per device
    assert sizes(cfg, TINY, machine(), "replica") == {1}
    assert sizes(cfg, TINY, nodes, "replica") == {1, 2}  # one node of 8 each


def test_estimates_include_offload_and_slow_networks():
    def estimated(mesh: dict, where: Topology, offload=()):
        return estimate(run(), TINY, where, LENGTHS, mesh, 128, "full", offload)

    both = ("optimizer", "reference")
    kept, waiting = estimated(dict(fsdp=8), machine()), estimated(dict(fsdp=8), machine(), both)
    assert waiting.bytes < kept.bytes and waiting.step_s > kept.step_s
    nodes = Topology("h100:16", "gpu", CHIPS["h100"], list(range(16)))
    # weights gathered between nodes for every layer, against gradients summed between them
    assert estimated(dict(fsdp=8, replica=2), nodes).step_s < estimated(dict(fsdp=16), nodes).step_s


@pytest.mark.thorough
def test_estimated_memory_agrees_with_the_compiled_plan():
    """The state of a larger model dominates: weights, moments, gradients and reference."""
    model = dataclasses.replace(TINY, D=256, F=1024, V=1024)
    cfg = run()
    plan = make_plan(cfg, model, machine(), lengths=LENGTHS)
    live = max(phase.live_bytes for phase in plan.phases.values())
    formula = estimate(cfg, model, machine(), LENGTHS, {"fsdp": 4, "tensor": 2}, 256, "full")
    assert 0.4 * live < formula.bytes < 2.5 * live


@pytest.mark.slow
def test_the_fastest_candidate_that_fits_is_reported_with_its_keys():
    found = search(run(), TINY, machine(), lengths=LENGTHS, finalists=2)
    plans = [plan for _, plan in found if plan is not None]
    assert plans[0].fits and plans[0].expected_step_s <= plans[1].expected_step_s
    assert "--config.mesh.fsdp=" in search_text(found)


def test_too_little_memory_is_reported_with_numbers():
    with pytest.raises(
        ValueError, match=r"it needs at least .* GiB per device of .*; use more devices"
    ):
        search(run(), TINY, machine(1024.0), lengths=LENGTHS)
