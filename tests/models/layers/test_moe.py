"""Experts: that a mesh, adapters, a quantized base and merging change no number, nor a stack."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import LoRAConfig
from jaxrl.kernels.grouped_matmul import triton
from jaxrl.models import layer_loop
from jaxrl.models.config import RouterConfig, uniform_decoder
from jaxrl.models.decoder import decoder_specs, init_model, restrict
from jaxrl.models.kv_cache import init_cache
from jaxrl.models.layers.experts import ExpertMatrix, local_experts
from jaxrl.models.layers.router import route
from jaxrl.models.lora import adapters, add_adapters, merge, without_adapters
from jaxrl.models.packed import forward_packed
from jaxrl.models.paged import forward_paged
from jaxrl.models.quantize import map_matrices, quantize_matrix
from jaxrl.models.spec import abstract_params
from jaxrl.planner.topology import topology
from sharding import make_mesh
from sharding.rules import DECODE, TRAIN
from tests.marks import graded
from tests.models.test_adapter_stack import hidden
from tests.models.test_quantize import filled, numbers

MIXTURE = uniform_decoder(
    "qwen3_moe", L=2, D=16, N=4, K=2, H=8, F=24, V=32, E=8, top_k=2, F_expert=8
)
TOKENS = np.arange(8 * 16, dtype=np.int32).reshape(8, 16) % 32


def model_of(init="default", *, stacked=False):
    """A mixture of experts with adapters that change it; of PiSSA, whose B is not at its start."""
    base = init_model(dataclasses.replace(MIXTURE, stacked=stacked), seed=0, rules=TRAIN)
    base = jax.tree.map(lambda w: 8 * w if w.ndim > 2 else w, base)  # of norm 1, not 0.02
    targets = ("all-linear", "gate_proj", "up_proj", "down_proj")
    lora = adapters(LoRAConfig(rank=2, init=init, target_modules=targets), MIXTURE)
    model = add_adapters(base, lora, seed=1, rules=TRAIN, dtype=jnp.float32)
    if init == "default":
        return jax.tree.map_with_path(filled, model)

    def moved(path, leaf):
        return 0.5 * leaf if jax.tree_util.keystr(path).endswith(".b") else leaf

    return jax.tree.map_with_path(moved, model)


@pytest.mark.parametrize(
    ("sizes", "init", "stacked"),
    graded(
        [
            (dict(expert=2, tensor=2, fsdp=2), "default", False),
            (dict(expert=2, tensor=2, fsdp=2), "pissa", True),
            (dict(expert=4), "default", True),
            (dict(fsdp=4), "pissa", False),
            (dict(replica=2, sequence=2, tensor=2), "default", False),
        ],
        thorough=(),
    ),
)
def test_a_mesh_changes_no_logit_and_no_gradient(sizes, init, stacked):
    with jax.set_mesh(make_mesh()):
        want = numbers(model_of(init, stacked=stacked), jnp.asarray(TOKENS))
    with jax.set_mesh(make_mesh(**sizes)):
        found = numbers(model_of(init, stacked=stacked), jnp.asarray(TOKENS))
    for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        assert np.any(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * max(np.abs(b).max(), 1.0))


@pytest.mark.thorough
def test_the_gpu_kernel_type_checks_on_a_mesh(monkeypatch):
    """Forward and backward inside the model's shard_map; JAX emulates no kernel there."""
    monkeypatch.setattr(triton, "check_platform", lambda *_: None)
    with jax.set_mesh(make_mesh(expert=2, tensor=2, fsdp=2)):
        model = model_of()
        model = restrict(model, dataclasses.replace(model.cfg, grouped_matmul="triton"))
        gradient = jax.grad(lambda model: jnp.sum(hidden(model, TOKENS)))
        found = jax.make_jaxpr(gradient)(model)
    assert all(f"grouped_matmul_{name}" in str(found) for name in ("rows", "weights"))


def paged_hidden(model):
    """Hidden states of two rows of the engine."""
    cache, table = init_cache(model.cfg, 4, 64, jnp.float32, DECODE), jnp.array([[0, 1], [2, 3]])
    positions = jnp.array([np.arange(5), [0, 1, 2, -1, -1]])
    tokens = jnp.asarray(TOKENS[:2, :5])
    return forward_paged(model, tokens, positions, cache, {0: table}, rules=DECODE)[0]


@pytest.mark.parametrize(
    ("sizes", "whole"), [({}, True), (dict(expert=2, tensor=2), True), (dict(fsdp=2), False)]
)
def test_a_scan_of_the_engine_slices_only_experts_that_it_gathers(sizes, whole):
    """A gather of a whole stack would be one of all layers, in every layer."""
    cfg = dataclasses.replace(MIXTURE, stacked=True)
    with jax.set_mesh(make_mesh(**sizes)):
        mesh = jax.sharding.get_mesh()
        model = abstract_params(decoder_specs(cfg), DECODE, jnp.float32, mesh)
        made = jax.make_jaxpr(paged_hidden)(model)
    (scan,) = (eqn for eqn in made.eqns if eqn.primitive.name == "scan")
    shapes = [aval.shape for aval in scan.params["jaxpr"].in_avals]
    assert [shapes.count((*lead, 8, 8, 16)) for lead in ((2,), ())] == ([2, 0] if whole else [0, 2])


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("dtype", "init", "sizes"),
    graded(
        [
            ("", "default", {}),
            ("int8", "pissa", {}),
            ("nf4", "default", {}),
            ("", "pissa", dict(expert=2, tensor=2)),
            ("int8", "default", dict(expert=4)),
        ],
    ),
)
def test_experts_in_the_stack_give_the_bits_of_sliced_ones(dtype, init, sizes, monkeypatch):
    with jax.set_mesh(make_mesh(**sizes)):
        model = model_of(init, stacked=True)
        if dtype:
            model = map_matrices(lambda w, n: quantize_matrix(w, n, dtype, jnp.float32), model)
        y = jax.jit(lambda model: paged_hidden(model))(model)
        monkeypatch.setattr(layer_loop, "keeps_stack", lambda rules: False)
        want = jax.jit(lambda model: paged_hidden(model))(model)
    np.testing.assert_array_equal(y, want)
    assert np.abs(np.asarray(y)[0]).max() > 0.1


@pytest.mark.bitwise
@pytest.mark.thorough
def test_a_tokens_bits_do_not_depend_on_the_other_tokens(one_device):
    rng = np.random.default_rng(0)
    E, D, F, n = 4, 32, 48, 200

    def normal(*shape):
        return jnp.asarray(0.3 * rng.normal(size=shape).astype(np.float32))

    def matrix(out, into):
        return ExpertMatrix(normal(E, out, into), normal(E, 4, into), normal(E, out, 4), scale=1.5)

    matrices = dict(gate=matrix(F, D), up=matrix(F, D), down=matrix(D, F))
    x, weights = normal(n, D), jnp.asarray(rng.random((n, 2), np.float32))
    experts = jnp.asarray([rng.permutation(E)[:2] for _ in range(n)], jnp.int32)
    run = jax.jit(functools.partial(local_experts, act="silu", implementation="auto"))
    whole = run(x, weights, experts, matrices)
    for rows in (np.array([7]), np.arange(20, 25)):  # one block of 8 rows per expert, not 128
        some = run(x[rows], weights[rows], experts[rows], matrices)
        np.testing.assert_array_equal(some, whole[rows])


def test_no_float32_copy_of_the_experts_rows_exists():
    """Neither in forward nor in backward: rows are converted to float32 when they are summed."""
    E, D, F, n, k = 4, 32, 48, 64, 3
    S = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = dict(gate=S((E, F, D)), up=S((E, F, D)), down=S((E, D, F)))
    matrices = {name: ExpertMatrix(w) for name, w in weights.items()}
    experts = jax.ShapeDtypeStruct((n, k), jnp.int32)

    def gradient(x, probs, experts, matrices, dy):
        run = functools.partial(local_experts, act="silu", implementation="ragged_dot")
        y, pull = jax.vjp(lambda x, m: run(x, probs, experts, m), x, matrices)
        return pull(dy.astype(y.dtype))

    args = S((n, D)), S((n, k)), experts, matrices, S((n, D))
    shapes = set(re.findall(r"(\w+\[[\d,]+\])", str(jax.make_jaxpr(gradient)(*args))))
    assert f"bf16[{n * k},{D}]" in shapes
    assert f"f32[{n * k},{D}]" not in shapes and f"f32[{E},{D},{F}]" not in shapes


@pytest.mark.thorough
@pytest.mark.bitwise
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_room_for_a_devices_share_of_the_tokens_changes_no_bit(one_device, share):
    """One of 4 devices has room for half of the copies; its experts get `share` of them."""
    rng = np.random.default_rng(0)
    E, D, F, n = 2, 32, 48, 64

    def normal(*shape):
        return jnp.asarray(0.3 * rng.normal(size=shape).astype(np.float32))

    weights = dict(gate=normal(E, F, D), up=normal(E, F, D), down=normal(E, D, F))
    matrices = {name: ExpertMatrix(w) for name, w in weights.items()}
    x, probs = normal(n, D), jnp.asarray(rng.random((n, 2), np.float32))
    here = rng.random((n, 2)) < share
    experts = jnp.asarray(np.where(here, np.arange(2), E + np.arange(2)), jnp.int32)

    def outputs(n_sharing):
        run = functools.partial(local_experts, act="silu", implementation="auto")
        loss = lambda *a: jnp.sum(run(*a, n_sharing=n_sharing) ** 2)  # noqa: E731
        grads = jax.jit(jax.grad(loss, argnums=(0, 1, 3)))(x, probs, experts, matrices)
        return jax.jit(functools.partial(run, n_sharing=n_sharing))(
            x, probs, experts, matrices
        ), grads

    whole, part = outputs(1), outputs(4)
    assert np.any(whole[0])
    np.testing.assert_array_equal(whole[0], part[0])
    for a, b in zip(*map(jax.tree.leaves, (whole[1], part[1])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("E", "router"),
    [
        (4, RouterConfig(2, norm=False)),
        (8, RouterConfig(3)),
        (8, RouterConfig(3, "sigmoid", correction=True, n_groups=4, top_groups=2, scale=1.7)),
    ],
)
def test_a_tokens_route_does_not_depend_on_the_other_tokens(one_device, E, router):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 256, E)).astype(np.float32)
    correction = rng.normal(size=E).astype(np.float32) if router.correction else None
    run = jax.jit(functools.partial(route, given=None, router=router))
    whole = run(logits, correction)[:3]
    for n in (2, 8, 64):
        some = run(logits[0, :n, None], correction)[:3]
        for a, b in zip(some, whole, strict=True):
            np.testing.assert_array_equal(a[:, 0], b[0, :n])


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("init", ["default", "pissa"])
def test_merged_experts_compute_the_same(init, stacked, one_device):
    model = model_of(init, stacked=stacked)
    merged = np.asarray(hidden(merge(model), TOKENS))
    np.testing.assert_allclose(merged, hidden(model, TOKENS), atol=1e-4)
    assert np.abs(merged - hidden(without_adapters(model), TOKENS)).max() > 0.1


@pytest.mark.thorough
def test_gathers_of_experts_on_gpu_transpose_no_stack_of_layers():
    """XLA gathers along the major dimension in memory, and would store stacks in this order."""
    pytest.importorskip("jax_cuda13_plugin")
    L, E, D, F = 6, 8, 1024, 384
    mixture = uniform_decoder(
        "qwen3_moe", L=L, D=D, N=4, K=2, H=64, F=F, V=512, E=E, top_k=2, F_expert=F, stacked=True
    )

    def loss(model, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        args = model, tokens, jnp.ones_like(tokens), positions
        return jnp.sum(forward_packed(*args, rules=TRAIN, remat="full").astype(jnp.float32))

    machine = topology("h100:8")
    with jax.set_mesh(make_mesh(machine.devices, fsdp=8)):
        mesh = jax.sharding.get_mesh()
        model = abstract_params(decoder_specs(mixture), TRAIN, jnp.bfloat16, mesh)
        rows = jax.NamedSharding(mesh, TRAIN.spec("batch", "time"))
        tokens = jax.ShapeDtypeStruct((8, 128), jnp.int32, sharding=rows)
        lowered = jax.jit(jax.grad(loss)).lower(model, tokens)
        text = lowered.compile(dict(machine.compiler_options)).as_text()
    stack = L * E * F * D // 8
    arrays = re.findall(r"= bf16\[([\d,]+)\](\S*) (?:transpose|copy|fusion)\(", text)
    kept = {(dims, order) for dims, order in arrays if np.prod(np.int64(dims.split(","))) == stack}
    assert kept  # the gradients of stacks
    row_major = "{3,2,1,0}"
    assert {order for _, order in kept} == {row_major}
    assert {dims for dims, _ in kept} == {f"{L},{E},{F},{D // 8}", f"{L},{E},{D // 8},{F}"}
