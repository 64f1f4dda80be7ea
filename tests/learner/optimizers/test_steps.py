"""Steps of every optimizer: on a mesh, with stacked layers, offloaded, rejected and resumed."""

# Unions in the types of optax and jax, without the fields that are read here.
# pyright: reportArgumentType=false
# pyright: reportOptionalMemberAccess=false

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config.keys import CheckpointConfig, LearnerConfig
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.optimizers import slices
from jaxrl.learner.optimizers.layerwise import OUTSIDE, TABLES, part_of
from jaxrl.learner.state import abstract_state, apply_gradients, init_state
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import hf_names, is_spec
from sharding import TRAIN, bytes_per_device, make_mesh
from tests.learner.tiny_policy import MODEL, host_params, new_params, put_params, stack_layers
from tests.marks import graded
from tests.models.resized import resized

LISTED = resized(MODEL, L=2, D=64, H=16, F=64, V=96, tied=False)
STACKED = dataclasses.replace(LISTED, stacked=True)
WITH_INPUTS = dataclasses.replace(LISTED, input_P=16, input_V=96)  # of layers, by token
TABLE_NAMES = ("model.embed_tokens", "lm_head", "model.embed_tokens_per_layer")
MIXED = dict(replica=2, fsdp=2, tensor=2)
LR = 1e-2
KINDS = {
    "adamw": dict(),
    "adamw bfloat16": dict(moment_dtype="bfloat16"),
    "adamw int8": dict(moment_dtype="int8"),
    "adafactor": dict(optimizer="adafactor?min_dim_size_to_factor=16"),
    "lion": dict(optimizer="lion"),
    "muon": dict(optimizer="muon"),
    "muon int8": dict(optimizer="muon?scale=shape", moment_dtype="int8"),
    "sgd by layer": dict(optimizer="sgd", lr_layer_decay=0.5, weight_decays=("norm=0.1",)),
    "optax": dict(optimizer="optax:adabelief"),
}
NO, YES = np.asarray(False), np.asarray(True)
MOST = ("adamw", "adamw int8", "muon")
every_kind = pytest.mark.parametrize("kind", graded(KINDS, thorough=MOST))


@functools.cache
def optimizer_of(kind: str, model: DecoderConfig):
    cfg = LearnerConfig(lr=LR, eps=1e-3, weight_decay=0.1, **KINDS[kind])
    return make_optimizer(cfg, 10, decoder_specs(model))


def gradients(model: DecoderConfig, step: int):
    """Gradients of the weights' size on the current mesh, the same for both layer layouts."""
    listed = dataclasses.replace(model, stacked=False)
    rng = np.random.default_rng(step)
    draw = lambda p: rng.standard_normal(p.shape).astype(np.float32)  # noqa: E731
    grads = jax.tree.map(draw, host_params(listed, 0, "float32"))
    return put_params(stack_layers(grads, model) if model.stacked else grads, model, TRAIN)


def program(kind: str, model: DecoderConfig, state):
    """A compiled step(state, grads, keep)."""
    optimizer = optimizer_of(kind, model)
    step = jax.jit(lambda state, grads, keep: apply_gradients(state, grads, optimizer, keep=keep))
    return step.lower(state, gradients(model, 0), NO).compile()


def walk(kind: str, model: DecoderConfig, n_steps: int = 3, *, offload: bool = False):
    state = init_state(new_params(model=model), optimizer_of(kind, model), offload=offload)
    step = program(kind, model, state)
    for k in range(n_steps):
        state = step(state, gradients(model, k), NO)
    return state


def same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@every_kind
def test_a_mesh_and_stacked_layers_change_no_step_beyond_rounding(kind):
    with jax.set_mesh(make_mesh()):
        one = jax.device_get(walk(kind, LISTED).params)
    with jax.set_mesh(make_mesh(**MIXED)):
        other = jax.device_get(walk(kind, STACKED).params)
    # Narrow moments amplify rounding, and stochastic rounding draws its bits per array.
    steps = 0.5 if kind == "adamw bfloat16" else 0.05 if "int8" in kind else 1e-3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=steps * LR),
        stack_layers(one, STACKED),
        other,
    )


@every_kind
def test_a_compiled_step_has_the_state_that_the_planner_counts(kind):
    """bytes_per_device of the abstract state, which plans report, is what a step is passed."""
    mesh = make_mesh(**MIXED)
    with jax.set_mesh(mesh):
        optimizer, specs = optimizer_of(kind, STACKED), decoder_specs(STACKED)
        state = abstract_state(specs, jnp.dtype("bfloat16"), optimizer, TRAIN, mesh)
        grads = gradients(STACKED, 0)
        found = program(kind, STACKED, state).memory_analysis().argument_size_in_bytes
    counted = bytes_per_device(state) + bytes_per_device(grads) + 1  # and `keep`
    assert found == pytest.approx(counted, rel=1e-3)


@every_kind
def test_a_rejected_step_keeps_every_bit(kind):
    with jax.set_mesh(make_mesh(**MIXED)):
        state = walk(kind, STACKED, 1)
        grads = jax.tree.map(lambda g: g * np.nan, gradients(STACKED, 1))
        same_bits(program(kind, STACKED, state)(state, grads, YES), state)


@every_kind
def test_an_offloaded_state_takes_the_same_steps(kind):
    """Layer by layer, except for a plug-in and for moments in bfloat16."""
    with jax.set_mesh(make_mesh(**MIXED)):
        ours, theirs = walk(kind, STACKED, 2, offload=True), walk(kind, STACKED, 2)
    # A loop over layers is fused in another way, which changes the last bit of some weights.
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, *jax.device_get((ours.params, theirs.params)))


@pytest.mark.thorough
def test_an_offloaded_state_of_listed_layers_takes_the_same_steps():
    kind = "sgd by layer"
    with jax.set_mesh(make_mesh(**MIXED)):
        same_bits(walk(kind, LISTED, 2, offload=True), walk(kind, LISTED, 2))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "model"), [("adamw", LISTED), ("lion", LISTED), ("adamw", WITH_INPUTS)]
)
def test_blocks_of_a_tables_rows_take_the_step_of_the_table(kind, model, monkeypatch):
    """Tables of 96 x 32 numbers per device, or 96 x 16, in blocks of 4,096 bytes."""
    # A loop is fused in another way, which changes the last bit of some numbers.
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-7)
    with jax.set_mesh(make_mesh(fsdp=2)):
        whole = walk(kind, model, 2, offload=True)
        monkeypatch.setattr(slices, "SLICE_BYTES", 4096)
        blocks = walk(kind, model, 2, offload=True)
        jax.tree.map(close, *jax.device_get((blocks, whole)))


def test_the_tables_of_a_decoder_are_parts_that_rows_divide():
    """Also that of the inputs of layers, which is the largest tensor of Gemma 4 E4B."""
    paths = jax.tree_util.tree_leaves_with_path(decoder_specs(WITH_INPUTS), is_leaf=is_spec)
    found = {hf_names(spec)[0]: part_of(path) for path, spec in paths}
    parts = {found[f"{name}.weight"] for name in TABLE_NAMES}
    assert len(parts) == len(TABLE_NAMES) and parts == set(TABLES.values())
    assert found["model.per_layer_model_projection.weight"] == OUTSIDE


@pytest.mark.parametrize(
    ("kind", "model"),
    graded([(kind, model) for kind in ("adamw int8", "muon") for model in (LISTED, STACKED)]),
)
def test_blocks_of_layers_take_the_step_of_all_layers(kind, model, monkeypatch):
    """One layer and a sixth of a table at a time."""
    with jax.set_mesh(make_mesh(fsdp=2)):
        at_once = walk(kind, model, 2)
        monkeypatch.setattr(slices, "SLICE_BYTES", 2048)
        in_blocks = walk(kind, model, 2)
    # A loop is fused in another way, which changes the last bit of some numbers.
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-7)
    jax.tree.map(close, *jax.device_get((at_once.params, in_blocks.params)))


DEEP = resized(STACKED, L=24)


@pytest.mark.parametrize("kind", graded(["adamw int8", "muon", "muon int8"], default=[]))
def test_a_step_needs_temporaries_of_few_layers(kind, monkeypatch):
    """Not of the model: a step at once has float32 numbers for 24 layers, in blocks for one."""
    layer = 4 * (4 * 64 * 64 + 3 * 64 * 64)
    assert step_temporaries(kind) > 24 * layer
    monkeypatch.setattr(slices, "SLICE_BYTES", 4 * 64 * 64)
    assert step_temporaries(kind) < 8 * layer


def step_temporaries(kind: str) -> int:
    """Bytes of the compiled step of DEEP on one device, which updates the state in place."""
    optimizer, mesh = optimizer_of(kind, DEEP), make_mesh()
    with jax.set_mesh(mesh):
        specs = decoder_specs(DEEP)
        state = abstract_state(specs, jnp.dtype("float32"), optimizer, TRAIN, mesh)
        step = jax.jit(lambda s, g, k: apply_gradients(s, g, optimizer, keep=k), donate_argnums=0)
        analysis = step.lower(state, state.params, NO).compile().memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize(
    ("kind", "model", "sizes", "n_barriers", "n_loops"),
    [
        ("adamw", LISTED, {}, 4, 0),  # two listed layers, two tables and the norm
        ("adamw", STACKED, {}, 3, 1),
        ("adamw", LISTED, dict(fsdp=2), 4, 2),  # tables in blocks of rows
        ("adamw", LISTED, dict(tensor=2), 4, 0),  # sharded rows
        ("adamw int8", LISTED, dict(fsdp=2), 4, 2),
        ("adafactor", LISTED, dict(fsdp=2), 4, 0),
    ],
)
def test_a_step_by_layer_reads_a_part_after_the_one_before_is_written(
    kind, model, sizes, n_barriers, n_loops, monkeypatch
):
    monkeypatch.setattr(slices, "SLICE_BYTES", 4096 if sizes else 2**20)
    with jax.set_mesh(make_mesh(**sizes)):
        optimizer = optimizer_of(kind, model)
        state = init_state(new_params(model=model), optimizer, offload=True)
        step = lambda s, g, k: apply_gradients(s, g, optimizer, keep=k)  # noqa: E731
        jaxpr = str(jax.make_jaxpr(step)(state, gradients(model, 0), NO))
    assert jaxpr.count("optimization_barrier") == n_barriers + n_loops  # one in each loop
    assert jaxpr.count("while[") + jaxpr.count("scan[") == n_loops


@every_kind
def test_a_resumed_run_takes_the_same_steps_on_any_layer_layout(kind, tmp_path):
    mesh = make_mesh(**MIXED)
    with jax.set_mesh(mesh):
        checkpoints = Checkpointer(tmp_path, CheckpointConfig())
        checkpoints.save(2, walk(kind, STACKED, 2), {})
        checkpoints.wait()
        restored = {}
        for model in (STACKED, LISTED):
            abstract = abstract_state(
                decoder_specs(model), jnp.dtype("float32"), optimizer_of(kind, model), TRAIN, mesh
            )
            restored[model.stacked] = checkpoints.restore(abstract)[0]
        checkpoints.close()
        step = program(kind, STACKED, restored[True])
        same_bits(step(restored[True], gradients(STACKED, 2), NO), walk(kind, STACKED, 3))
        listed, stacked = jax.device_get((restored[False].params, restored[True].params))
        same_bits(stack_layers(listed, STACKED), stacked)
