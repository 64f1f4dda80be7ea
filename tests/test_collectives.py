"""The collectives of a compiled step, per mesh: those that the layout needs, and no others.

Counted are arrays, not instructions (XLA joins several into one), as often as they are moved, and only
arrays of at least MATRIX elements: norms, biases and metrics are summed as well, but weigh nothing.
"""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from jaxrl.config import LearnerConfig, RolloutConfig, RunConfig
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.state import abstract_state
from jaxrl.learner.step import make_update
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import abstract_params
from jaxrl.planner.cost import Collective, program_cost
from jaxrl.planner.programs import abstract_batch
from jaxrl.rollout.engine import PagedEngine
from sharding import TRAIN, make_mesh
from sharding.rules import DECODE

L, W = 3, 7  # layers, and matrices in each: q, k, v, o, gate, up, down
MODEL = DecoderConfig(
    family="llama", L=L, D=64, N=4, K=4, H=16, F=128, V=512, tied=False, stacked=True
)
RUN = RunConfig(learner=LearnerConfig(token_budget=128, halvings=0, logprob_chunk=1024))
MATRIX = 1024  # elements; the smallest shard of a matrix here has 64 * 64 / 4

# Each layer's matrices are gathered in forward and again in backward, where they are recomputed, and
# their gradients reduce-scattered; embedding and head once each way.
GATHERS = 2 * L * W + 2
SCATTERS = L * W + 2
# Under tensor parallelism a layer sums its residual stream over the shards twice in forward, once more where
# backward recomputes what the second one needs (the first sum), and twice in backward: the gradients of what
# q, k, v and gate, up read, five arrays. Embedding and head sum once each.
SUMS = L * (2 + 1 + 5) + 2

UPDATE = {  # mesh -> arrays moved by one micro-batch, per kind
    "one": ({}, {}),
    "fsdp": (dict(fsdp=8), {"all-gather": GATHERS, "reduce-scatter": SCATTERS}),
    "hsdp": (
        dict(replica=2, fsdp=4),
        # every gradient is summed over the replicas, after it was cut
        {"all-gather": GATHERS, "reduce-scatter": SCATTERS, "all-reduce": SCATTERS},
    ),
    "tensor": (dict(tensor=4), {"all-reduce": SUMS}),
    "fsdp x tensor": (
        dict(fsdp=4, tensor=2),
        {"all-gather": GATHERS, "reduce-scatter": SCATTERS, "all-reduce": SUMS},
    ),
}


@functools.cache
def update_collectives(mesh_name: str) -> list[Collective]:
    mesh = make_mesh(**UPDATE[mesh_name][0])
    with jax.set_mesh(mesh):
        specs = decoder_specs(MODEL)
        optimizer = make_optimizer(RUN.learner, 10, specs)
        state = abstract_state(specs, jnp.dtype("float32"), optimizer, TRAIN, mesh)
        batch = abstract_batch(RUN, TRAIN, mesh)
        program = make_update(RUN, optimizer, TRAIN).lower(state, batch)["accumulate"].compile()
    return program_cost(program.as_text() or "", lambda loop: 1).collectives


def moved(collectives: list[Collective]) -> dict[str, int]:
    found = collections.Counter()
    for one in collectives:
        # what a reduce-scatter is given is as many times its result
        whole = one.n_devices if one.kind == "reduce-scatter" else 1
        large = sum(whole * math.prod(shape.dims) >= MATRIX for shape in one.shapes)
        if one.kind == "all-to-all":  # its parts are arrays of their own on CPU
            large = min(large, 1)
        found[one.kind] += large * round(one.times)
    return {kind: n for kind, n in found.items() if n}


@pytest.mark.parametrize("mesh", UPDATE)
def test_an_update_moves_what_its_layout_needs_and_nothing_else(mesh):
    found = update_collectives(mesh)
    listed = "\n".join(
        f"{one.times:g} x {one.kind} of {one.n_devices}: {[s.dims for s in one.shapes]} {one.op_name}"
        for one in found
    )
    assert moved(found) == UPDATE[mesh][1], listed


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "fsdp x tensor"])
def test_weights_of_a_stack_are_gathered_layer_by_layer(mesh):
    """Outside the scan over the layers only embedding and head are gathered, which are used there."""
    outside = [
        shape.dims
        for one in update_collectives(mesh)
        if one.kind == "all-gather" and not one.in_loop
        for shape in one.shapes
    ]
    tensor = UPDATE[mesh][0].get("tensor", 1)
    assert set(outside) == {(MODEL.V // tensor, MODEL.D)}


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp x tensor"])
def test_no_gradient_is_summed_whole_under_fsdp(mesh):
    n = UPDATE[mesh][0]["fsdp"]
    whole = [
        one
        for one in update_collectives(mesh)
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
        compiled = engine.lower(params, 16)[program].compile()
    return program_cost(compiled.as_text() or "", lambda loop: 1).collectives


def test_a_decode_step_under_tensor_parallelism_sums_and_trades_logits():
    found = engine_collectives("decode")
    # two sums a layer and one of the embedding; each device then samples some of the rows, for which it
    # trades its share of all rows' logits for all logits of those rows
    assert moved(found) == {"all-reduce": 2 * L + 1, "all-to-all": 1}, found
    rest = [one for one in found if one.kind not in ("all-reduce", "all-to-all")]
    assert all(one.bytes <= 64 * 4 for one in rest), rest  # a token and a logprob a row


def test_pages_are_copied_without_talking():
    assert not engine_collectives("copy_pages")
