"""Tests of the collectives in compiled steps: each mesh has those that it needs, and no others.

The count is of arrays, not of instructions (XLA merges several into one), once per execution. Only
arrays of at least MATRIX elements count: norms, biases and metrics are reduced too, but are small.
Covers sharding/rules.py and sharding/collectives.py in updates and decode steps.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl.config.keys import LearnerConfig, MeshConfig, RolloutConfig, RunConfig
from jaxrl.engine.engine import PagedEngine
from jaxrl.layout import training_rules
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.programs import abstract_batch
from jaxrl.learner.state import abstract_state
from jaxrl.learner.step import make_update
from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import abstract_params
from jaxrl.planner.compiled.cost import program_cost
from jaxrl.planner.compiled.timeline import Collective
from sharding import make_mesh
from sharding.rules import DECODE
from tests.marks import graded
from tests.models.resized import resized

L, W = 4, 7  # layers, and matrices in each: q, k, v, o, gate, up, down
MODEL = uniform_decoder("llama", L=L, D=64, N=4, K=4, H=16, F=128, V=512, tied=False, stacked=True)
EXPERTS = resized(MODEL, family="qwen3_moe", E=8, top_k=2, F_expert=64)
ROW = LearnerConfig(token_budget=128, halvings=0, logprob_chunk=1024)
WHOLE = dataclasses.replace(ROW, shard_residual=False)
LONG_ROW = dataclasses.replace(ROW, token_budget=512, sequence_parallel="ring")
PLACES = dataclasses.replace(LONG_ROW, ulysses_size=2)
M = 4  # rows per rank in the pipeline
ROWS = dataclasses.replace(ROW, token_budget=M * 128, buckets=(128,))
MATRIX = 1024  # elements; the smallest shard of a matrix here has 64 * 64 / 4

# Each layer's matrices are gathered in forward and again in backward, which recomputes the layer,
# and their gradients are reduce-scattered; embedding and head once each way.
GATHERS = 2 * L * W + 2
SCATTERS = L * W + 2
# Under tensor parallelism a layer gathers its tokens twice in forward (for q, k, v and for gate,
# up) and scatters its sums twice. Backward gathers both inputs again, and the gradients of both
# outputs; it computes the first sum again, and scatters the gradients of both inputs. The output of
# the last layer is gathered for the head, its gradient for the embedding. Embedding and head
# all-reduce once. XLA on CPU has no reduce-scatter here: it all-reduces and slices.
TOKEN_GATHERS = L * (2 + 2 + 2) + 2
TOKEN_SUMS = L * (2 + 1 + 2) + 2
# Without sharding of the residual stream, a layer all-reduces it twice in forward, and once more in
# backward, which recomputes the input of the second (the first sum). Backward also reduces the
# gradients of the inputs of q, k, v and of gate, up: five arrays.
WHOLE_SUMS = L * (2 + 1 + 5) + 2
# Ulysses: q, k, v and the attention output, in forward, recomputed, and as gradients.
EXCHANGES = L * 3 * 4
# Ring: keys and values make three hops around four devices, in forward, recomputed, and in
# backward. There their gradient sums travel too, in two chunks each, and one hop further, home.
HOPS = L * (3 * 2 * 3 + 2 * 2 * 4)
# Around two places the recomputed hop is the same as that of backward, and XLA merges them.
HOPS_OF_TWO = L * (1 * 2 * 2 + 2 * 2 * 2)
# Pipeline: M rows and two stages of L / 2 layers take M + 1 ticks, each with a gather of the
# stage's layers.
TICKS = M + 1
TURNS = TICKS * L // 2

UPDATE = {  # name -> mesh, learner, model, arrays moved by one micro-batch per kind
    "one": (dict(), ROW, MODEL, {}),
    "fsdp": (dict(fsdp=8), ROW, MODEL, {"all-gather": GATHERS, "reduce-scatter": SCATTERS}),
    "hsdp": (
        dict(replica=2, fsdp=4),
        ROW,
        MODEL,
        # every gradient is all-reduced over the replicas after the reduce-scatter
        {"all-gather": GATHERS, "reduce-scatter": SCATTERS, "all-reduce": SCATTERS},
    ),
    "tensor": (
        dict(tensor=4),
        ROW,
        MODEL,
        {"all-gather": TOKEN_GATHERS, "all-reduce": TOKEN_SUMS},
    ),
    "tensor, whole residual": (dict(tensor=4), WHOLE, MODEL, {"all-reduce": WHOLE_SUMS}),
    "fsdp x tensor": (
        dict(fsdp=4, tensor=2),
        ROW,
        MODEL,
        {
            "all-gather": GATHERS + TOKEN_GATHERS,
            "reduce-scatter": SCATTERS,
            "all-reduce": TOKEN_SUMS,
        },
    ),
    "ulysses": (
        dict(fsdp=2, sequence=4),
        ROW,
        MODEL,
        {"all-gather": GATHERS, "reduce-scatter": SCATTERS, "all-to-all": EXCHANGES},
    ),
    "ring": (
        dict(fsdp=2, sequence=4),
        LONG_ROW,
        MODEL,
        {"all-gather": GATHERS, "reduce-scatter": SCATTERS, "collective-permute": HOPS},
    ),
    "ring of ulysses": (
        dict(fsdp=2, sequence=4),
        PLACES,
        MODEL,
        {
            "all-gather": GATHERS,
            "reduce-scatter": SCATTERS,
            "collective-permute": HOPS_OF_TWO,
            "all-to-all": EXCHANGES,
        },
    ),
    "expert": (
        dict(fsdp=4, expert=2),
        ROW,
        EXPERTS,
        {
            # tokens are sent to the experts in forward, recomputed, and for the gradient of the
            # output; sums return in forward, and for the gradient of the input
            "all-gather": GATHERS + 3 * L,
            "reduce-scatter": SCATTERS + 2 * L,
            # for all weights except the experts, the expert axis is one more replica axis
            "all-reduce": L * 4 + 2,
        },
    ),
    "pipeline": (
        dict(stage=2, fsdp=2),
        ROWS,
        MODEL,
        {
            # the residual stream, whose rows the stages shard, before the first and after the last
            # layer, and its gradient
            "all-gather": 2 * TURNS * W + 2 + 2,
            "reduce-scatter": TURNS * W + 2 + 2,
            "collective-permute": 2 * TICKS,
            "all-reduce": 2,  # for embedding and head the stages are replicas
        },
    ),
    "pipeline x tensor": (
        dict(stage=2, tensor=2),
        ROWS,
        MODEL,
        {
            # tokens as under "tensor", in every tick, with a real reduce-scatter; before and after
            # the stages, the tokens are also gathered over tensor
            "all-gather": TURNS * (2 + 2 + 2) + 2 + 2,
            "reduce-scatter": TURNS * (2 + 1 + 2) + 2,
            "collective-permute": 2 * TICKS,
            "all-reduce": 2 + 2,  # as above, and over the shards of the vocabulary
        },
    ),
}


def compiled_update(name: str, devices: Sequence[Any] | None = None, dtype: str = "float32"):
    """The compiled `accumulate` of a layout, for the local devices or the given ones."""
    sizes, learner, model, _ = UPDATE[name]
    cfg = RunConfig(learner=learner, mesh=MeshConfig(**{"fsdp": 1} | sizes))
    rules = training_rules(cfg)
    mesh = make_mesh(devices and devices[: math.prod(sizes.values())], **sizes)
    with jax.set_mesh(mesh):
        specs = decoder_specs(model)
        optimizer = make_optimizer(learner, 10, specs)
        state = abstract_state(specs, jnp.dtype(dtype), optimizer, rules, mesh)
        rows, row_len = cfg.learner.shapes[-1]
        batch = abstract_batch(rules.n_shards("batch") * rows, row_len, rules)
        lowerings = make_update(cfg, optimizer, rules).lowerings(state, batch)
        return lowerings["accumulate"]().compile()


@functools.cache
def update_collectives(name: str) -> list[Collective]:
    return program_cost(compiled_update(name).as_text() or "", lambda loop: 1).collectives


def array_sizes(one: Collective) -> list[int]:
    """Elements of the arrays that a collective moves."""
    sizes = [math.prod(shape.dims) for shape in one.shapes]
    if one.kind == "all-to-all":  # its parts are separate arrays on CPU
        return [sum(sizes)]
    # the input of a reduce-scatter is n_devices times its result
    return [n * (one.n_devices if one.kind == "reduce-scatter" else 1) for n in sizes]


def moved(collectives: list[Collective]) -> dict[str, int]:
    found = collections.Counter()
    for one in collectives:
        found[one.kind] += sum(n >= MATRIX for n in array_sizes(one)) * round(one.times)
    return {kind: n for kind, n in found.items() if n}


SLOW = ("ring", "expert", "pipeline", "pipeline x tensor")  # the longest to compile


def layouts(names):
    """Test parameters of the layouts, marked by how long they take to compile."""
    return graded(names, default={"fsdp"} & {*names}, thorough=[n for n in names if n not in SLOW])


@pytest.mark.parametrize("name", layouts(UPDATE))
def test_an_update_has_only_the_collectives_of_its_layout(name):
    found = update_collectives(name)
    listed = "\n".join(
        f"{one.times:g} x {one.kind} of {one.n_devices}: "
        f"{[s.dims for s in one.shapes]} {one.op_name}"
        for one in found
    )
    assert moved(found) == UPDATE[name][-1], listed


SHARDED = [name for name, (mesh, *_) in UPDATE.items() if "fsdp" in mesh]


@pytest.mark.parametrize("name", layouts(SHARDED))
def test_weights_of_a_stack_are_gathered_layer_by_layer(name):
    """Only embedding and head are gathered once, outside the scan over the layers."""
    outside = [
        shape.dims
        for one in update_collectives(name)
        if one.kind == "all-gather" and one.times == 1
        for shape in one.shapes
        if math.prod(shape.dims) >= MATRIX
    ]
    tensor = UPDATE[name][0].get("tensor", 1)
    rows = {(M, 1, 128, MODEL.D)} if name == "pipeline" else set()  # activations
    rows |= {(1, 128, MODEL.D)} if tensor > 1 else set()
    assert set(outside) == {(MODEL.V // tensor, MODEL.D)} | rows


@pytest.mark.parametrize("name", layouts(sorted(set(SHARDED) - {"hsdp", "pipeline"})))
def test_no_gradient_is_all_reduced_whole_under_fsdp(name):
    sizes = UPDATE[name][0]
    n = sizes["fsdp"] * sizes.get("sequence", 1)  # devices that share a weight
    whole = [
        one
        for one in update_collectives(name)
        if one.kind == "all-reduce" and one.n_devices >= n and one.bytes >= 4 * MATRIX
    ]
    assert not whole, whole


@functools.cache
def engine_collectives(program: str) -> list[Collective]:
    mesh = make_mesh(tensor=4)
    with jax.set_mesh(mesh):
        params = abstract_params(decoder_specs(MODEL), DECODE, jnp.float32, mesh)
        rollout = RolloutConfig(max_num_seqs=64, max_num_batched_tokens=128)
        engine = PagedEngine(MODEL, rollout, rules=DECODE, dtype=jnp.dtype("float32"), max_len=128)
        compiled = engine.runner.lower_largest(params, 16, program).compile()
    return program_cost(compiled.as_text() or "", lambda loop: 1).collectives


@pytest.mark.thorough
def test_a_decode_step_under_tensor_parallelism_reduces_and_exchanges_logits():
    found = engine_collectives("decode")
    # two sums per layer and one for the embedding; each device samples some of the rows, for which
    # it exchanges its vocabulary shard of all rows for all logits of those rows
    assert moved(found) == {"all-reduce": 2 * L + 1, "all-to-all": 1}, found
    rest = [one for one in found if one.kind not in ("all-reduce", "all-to-all")]
    assert all(one.bytes <= 64 * 4 for one in rest), rest  # a token and a logprob per row


@pytest.mark.thorough
def test_prefill_mixed_with_decode_adds_no_collectives():
    found = engine_collectives("mixed")  # as many as a decode step, over all tokens
    assert moved(found) == {"all-reduce": 2 * L + 1, "all-to-all": 1}, found


def test_copying_pages_has_no_collectives():
    assert not engine_collectives("copy_pages")


@pytest.mark.slow
def test_stages_send_the_share_of_one_tensor_device():
    sent = [one for one in update_collectives("pipeline x tensor") if "permute" in one.kind]
    assert {shape.dims for one in sent for shape in one.shapes} == {(1, 128 // 2, MODEL.D)}
