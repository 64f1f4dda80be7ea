"""The collectives of a compiled step, per mesh: those that the layout needs, and no others.

Counted are arrays, not instructions (XLA joins several into one), as often as they are moved, and only
arrays of at least MATRIX elements: norms, biases and metrics are summed as well, but weigh nothing.
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
from jaxrl.learner.state import abstract_state
from jaxrl.learner.step import make_update
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import abstract_params
from jaxrl.planner.cost import Collective, program_cost
from jaxrl.planner.programs import abstract_batch
from sharding import make_mesh
from sharding.rules import DECODE

L, W = 4, 7  # layers, and matrices in each: q, k, v, o, gate, up, down
MODEL = DecoderConfig(
    family="llama", L=L, D=64, N=4, K=4, H=16, F=128, V=512, tied=False, stacked=True
)
EXPERTS = dataclasses.replace(MODEL, family="qwen3_moe", E=8, top_k=2, F_expert=64)
ROW = LearnerConfig(token_budget=128, halvings=0, logprob_chunk=1024)
LONG_ROW = dataclasses.replace(ROW, token_budget=512, sequence_parallel="ring")
M = 4  # rows of a rank that go through the stages
ROWS = dataclasses.replace(ROW, token_budget=M * 128, buckets=(128,))
MATRIX = 1024  # elements; the smallest shard of a matrix here has 64 * 64 / 4

# Each layer's matrices are gathered in forward and again in backward, where they are recomputed, and
# their gradients reduce-scattered; embedding and head once each way.
GATHERS = 2 * L * W + 2
SCATTERS = L * W + 2
# Under tensor parallelism a layer sums its residual stream over the shards twice in forward, once more where
# backward recomputes what the second one needs (the first sum), and twice in backward: the gradients of what
# q, k, v and gate, up read, five arrays. Embedding and head sum once each.
SUMS = L * (2 + 1 + 5) + 2
# Ulysses: q, k, v and the outcome of attention, in forward, recomputed, and as gradients.
EXCHANGES = L * 3 * 4
# Ring: keys and values hop three times around four devices, in forward, recomputed, and in backward; there
# the sums of their gradients go along, in two chunks each, and one hop further, home.
HOPS = L * (3 * 2 * 3 + 2 * 2 * 4)
# Pipeline: M rows and two stages of L / 2 layers make M + 1 ticks, in each of which a stage gathers its layers.
TICKS = M + 1
TURNS = TICKS * L // 2

UPDATE = {  # name -> mesh, learner, model, arrays moved by one micro-batch per kind
    "one": (dict(), ROW, MODEL, {}),
    "fsdp": (dict(fsdp=8), ROW, MODEL, {"all-gather": GATHERS, "reduce-scatter": SCATTERS}),
    "hsdp": (
        dict(replica=2, fsdp=4),
        ROW,
        MODEL,
        # every gradient is summed over the replicas, after it was cut
        {"all-gather": GATHERS, "reduce-scatter": SCATTERS, "all-reduce": SCATTERS},
    ),
    "tensor": (dict(tensor=4), ROW, MODEL, {"all-reduce": SUMS}),
    "fsdp x tensor": (
        dict(fsdp=4, tensor=2),
        ROW,
        MODEL,
        {"all-gather": GATHERS, "reduce-scatter": SCATTERS, "all-reduce": SUMS},
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
    "expert": (
        dict(fsdp=4, expert=2),
        ROW,
        EXPERTS,
        {
            # tokens go to the experts in forward, recomputed, and for the gradient of what comes back;
            # sums come back in forward, and the gradient of what went there
            "all-gather": GATHERS + 3 * L,
            "reduce-scatter": SCATTERS + 2 * L,
            # to all weights but the experts' the expert axis is one more replica
            "all-reduce": L * 4 + 2,
        },
    ),
    "pipeline": (
        dict(stage=2, fsdp=2),
        ROWS,
        MODEL,
        {
            # the residual stream, of which the stages share the rows, before the first and behind the last
            # layer, and its gradient
            "all-gather": 2 * TURNS * W + 2 + 2,
            "reduce-scatter": TURNS * W + 2 + 2,
            "collective-permute": 2 * TICKS,
            "all-reduce": 2,  # to embedding and head the stages are replicas
        },
    ),
}


def compiled_update(name: str, devices: Sequence[Any] | None = None, dtype: str = "float32"):
    """`accumulate` of a layout, for the devices at hand or for others."""
    sizes, learner, model, _ = UPDATE[name]
    cfg = RunConfig(learner=learner, mesh=MeshConfig(**{"fsdp": 1} | sizes))
    rules = training_rules(cfg)
    mesh = make_mesh(devices and devices[: math.prod(sizes.values())], **sizes)
    with jax.set_mesh(mesh):
        specs = decoder_specs(model)
        optimizer = make_optimizer(learner, 10, specs)
        state = abstract_state(specs, jnp.dtype(dtype), optimizer, rules, mesh)
        batch = abstract_batch(cfg, rules, mesh)
        return make_update(cfg, optimizer, rules).lower(state, batch)["accumulate"].compile()


@functools.cache
def update_collectives(name: str) -> list[Collective]:
    return program_cost(compiled_update(name).as_text() or "", lambda loop: 1).collectives


def array_sizes(one: Collective) -> list[int]:
    """Elements of the arrays that a collective moves."""
    sizes = [math.prod(shape.dims) for shape in one.shapes]
    if one.kind == "all-to-all":  # its parts are arrays of their own on CPU
        return [sum(sizes)]
    # what a reduce-scatter is given is as many times its result
    return [n * (one.n_devices if one.kind == "reduce-scatter" else 1) for n in sizes]


def moved(collectives: list[Collective]) -> dict[str, int]:
    found = collections.Counter()
    for one in collectives:
        found[one.kind] += sum(n >= MATRIX for n in array_sizes(one)) * round(one.times)
    return {kind: n for kind, n in found.items() if n}


def layouts(names):
    """Those that take long to compile are slow."""
    long = [pytest.mark.slow]
    return [
        pytest.param(n, marks=long if n in ("ring", "expert", "pipeline") else []) for n in names
    ]


@pytest.mark.parametrize("name", layouts(UPDATE))
def test_an_update_moves_what_its_layout_needs_and_nothing_else(name):
    found = update_collectives(name)
    listed = "\n".join(
        f"{one.times:g} x {one.kind} of {one.n_devices}: {[s.dims for s in one.shapes]} {one.op_name}"
        for one in found
    )
    assert moved(found) == UPDATE[name][-1], listed


SHARDED = [name for name, (mesh, *_) in UPDATE.items() if "fsdp" in mesh]


@pytest.mark.parametrize("name", layouts(SHARDED))
def test_weights_of_a_stack_are_gathered_layer_by_layer(name):
    """Outside the scan over the layers only embedding and head are gathered, which are used there."""
    outside = [
        shape.dims
        for one in update_collectives(name)
        if one.kind == "all-gather" and not one.in_loop
        for shape in one.shapes
        if math.prod(shape.dims) >= MATRIX
    ]
    tensor = UPDATE[name][0].get("tensor", 1)
    rows = {(M, 1, 128, MODEL.D)} if name == "pipeline" else set()  # activations
    assert set(outside) == {(MODEL.V // tensor, MODEL.D)} | rows


@pytest.mark.parametrize("name", layouts(sorted(set(SHARDED) - {"hsdp", "pipeline"})))
def test_no_gradient_is_summed_whole_under_fsdp(name):
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
        compiled = engine.runner.lower(params, 16, program).compile()
    return program_cost(compiled.as_text() or "", lambda loop: 1).collectives


def test_a_decode_step_under_tensor_parallelism_sums_and_trades_logits():
    found = engine_collectives("decode")
    # two sums a layer and one of the embedding; each device then samples some of the rows, for which it
    # trades its share of all rows' logits for all logits of those rows
    assert moved(found) == {"all-reduce": 2 * L + 1, "all-to-all": 1}, found
    rest = [one for one in found if one.kind not in ("all-reduce", "all-to-all")]
    assert all(one.bytes <= 64 * 4 for one in rest), rest  # a token and a logprob a row


def test_prompts_beside_a_step_are_summed_with_it():
    found = engine_collectives("mixed")  # as many sums as of a step alone, over the tokens of both
    assert moved(found) == {"all-reduce": 2 * L + 1, "all-to-all": 1}, found


def test_pages_are_copied_without_talking():
    assert not engine_collectives("copy_pages")
