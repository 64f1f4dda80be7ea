"""Models on meshes: types without devices, collectives, and memory of compiled steps.

Tests of jaxrl/models/mesh_check.py and of the shardings in jaxrl/models/decoder.py.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from jaxrl.models.config import DecoderConfig, uniform_decoder
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.mesh_check import check_mesh
from jaxrl.models.packed import forward_packed
from jaxrl.models.spec import abstract_params, count_params
from sharding import RING, TRAIN, ULYSSES, Rules, abstract_mesh, bytes_per_device, make_mesh
from tests.models.resized import resized

QWEN2_7B = uniform_decoder(
    "qwen2",
    L=28,
    D=3584,
    N=28,
    K=4,
    H=128,
    F=18944,
    V=152064,
    qkv_bias=True,
    stacked=True,
)
SMALL = uniform_decoder("llama", L=6, D=128, N=4, K=2, H=32, F=256, V=256, tied=True)
ROW_LEN = 64


def abstract_forward(
    cfg: DecoderConfig, mesh: AbstractMesh, *, rules: Rules = TRAIN, row_len: int = 128
) -> tuple[jax.ShapeDtypeStruct, Decoder]:
    """Types of the logits [ranks, row_len, V] and of the gradient of their sum, without devices.

    Explicit shardings are part of the types, so a model with inconsistent shardings fails here.
    """
    check_mesh(cfg, mesh.shape, rules)
    with jax.sharding.use_abstract_mesh(mesh):
        params = abstract_params(decoder_specs(cfg), rules, jnp.bfloat16)
        sharding = NamedSharding(mesh, rules.spec("batch", "time"))
        shape = (rules.n_shards("batch"), row_len)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

        def logits(params: Decoder, tokens: jax.Array) -> jax.Array:
            ones = jnp.ones_like(tokens)
            hidden = forward_packed(params, tokens, ones, tokens, rules=rules, remat="full")
            return params.logits(hidden, rules)

        def loss(params: Decoder, tokens: jax.Array) -> jax.Array:
            return logits(params, tokens).sum()

        out = jax.eval_shape(logits, params, tokens)
        return out, jax.eval_shape(jax.grad(loss), params, tokens)


def test_places_of_a_ring_must_divide_the_kv_heads():
    rules = dataclasses.replace(RING, ulysses=4)
    check_mesh(QWEN2_7B, abstract_mesh(8, sequence=8).shape, rules)
    with pytest.raises(ValueError, match=r"4 kv heads over tensor=2 x learner.ulysses_size=4"):
        check_mesh(QWEN2_7B, abstract_mesh(16, sequence=8, tensor=2).shape, rules)
    with pytest.raises(ValueError, match=r"sequence=2 devices over learner.ulysses_size=4"):
        check_mesh(QWEN2_7B, abstract_mesh(2, sequence=2).shape, rules)


def test_a_7b_model_type_checks_on_64_absent_devices():
    mesh = abstract_mesh(64, fsdp=16, tensor=4)
    logits, grads = abstract_forward(QWEN2_7B, mesh, row_len=4096)
    assert logits.shape == (16, 4096, 152064) and logits.dtype == jnp.float32
    assert logits.sharding.spec == jax.P(("replica", "fsdp", "expert"), None, "tensor")
    up = grads.layers.mlp.up.w
    assert up.shape == (28, 18944, 3584) and up.dtype == jnp.bfloat16
    assert up.sharding.spec == jax.P(None, "tensor", "fsdp")


def test_a_7b_model_takes_its_share_of_each_device():
    specs = decoder_specs(QWEN2_7B)
    assert count_params(specs) == 7_615_616_512  # 7.61B on its model card
    with jax.sharding.use_abstract_mesh(abstract_mesh(64, fsdp=16, tensor=4)):
        share = bytes_per_device(abstract_params(specs, TRAIN, jnp.bfloat16))
    # Norms (57 x 3584) and the biases of keys and values are not sharded 64 ways.
    assert share == pytest.approx(2 * 7_615_616_512 / 64, rel=0.005)


@pytest.mark.parametrize(
    ("rules", "sizes"),
    [
        (ULYSSES, dict(fsdp=8, sequence=2, tensor=2)),  # 28 heads over 4, 4 kv heads
        # one query head per device, 7 copies of the kv heads
        pytest.param(ULYSSES, dict(fsdp=2, sequence=14, tensor=2), marks=pytest.mark.thorough),
        pytest.param(RING, dict(fsdp=4, sequence=4, tensor=4), marks=pytest.mark.thorough),
    ],
)
def test_a_7b_model_type_checks_with_sharded_rows(rules, sizes):
    mesh = abstract_mesh(int(np.prod(list(sizes.values()))), **sizes)
    logits, grads = abstract_forward(QWEN2_7B, mesh, rules=rules, row_len=14336)
    assert logits.sharding.spec == rules.spec("batch", "time", "vocab")
    assert grads.layers.mlp.up.w.sharding.spec == jax.P(None, "tensor", ("fsdp", "sequence"))


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(ULYSSES, id="ulysses", marks=pytest.mark.thorough),
        pytest.param(RING, id="ring", marks=pytest.mark.slow),
    ],
)
def test_a_70b_model_type_checks_with_stages_sequence_and_tensor(rules):
    cfg = uniform_decoder("llama", L=80, D=8192, N=64, K=8, H=128, F=28672, V=128256, stacked=True)
    mesh = abstract_mesh(256, stage=2, fsdp=2, sequence=8, tensor=8)
    rules = rules.with_stages()
    logits, grads = abstract_forward(cfg, mesh, rules=rules, row_len=32768)
    assert logits.sharding.spec == rules.spec("batch", "time", "vocab")
    assert grads.layers.mlp.up.w.sharding.spec == jax.P("stage", "tensor", ("fsdp", "sequence"))


def test_a_mesh_that_does_not_divide_the_heads_is_one_clear_error():
    check_mesh(SMALL, {"fsdp": 4, "tensor": 2})
    with pytest.raises(ValueError, match=r"2 kv heads over tensor=4.*config\.mesh"):
        check_mesh(SMALL, {"fsdp": 1, "tensor": 4})
    with pytest.raises(ValueError, match=r"128 model features over fsdp=3; .*"):
        check_mesh(SMALL, {"fsdp": 3, "tensor": 8})
    with pytest.raises(ValueError, match=r"4 query heads over tensor=2 x sequence=4 in attention"):
        check_mesh(SMALL, {"sequence": 4, "tensor": 2}, ULYSSES)
    check_mesh(SMALL, {"sequence": 4, "tensor": 2}, RING)
    with pytest.raises(ValueError, match=r"4 kv heads over tensor=8"):
        abstract_forward(QWEN2_7B, abstract_mesh(64, fsdp=8, tensor=8))


def total(model: Decoder, tokens: jax.Array, *, remat: str) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = forward_packed(
        model, tokens, jnp.ones_like(tokens), positions, rules=TRAIN, remat=remat
    )
    return (model.logits(hidden, TRAIN) ** 2).sum()


def compiled_gradient(cfg: DecoderConfig, remat: str, **sizes: int) -> tuple[str, Any]:
    """(program text, memory use) of the gradient on a mesh of these sizes, one row per device."""
    mesh = make_mesh(None, **sizes)
    sharding = jax.sharding.NamedSharding(mesh, TRAIN.spec("batch", "time"))
    tokens = jax.ShapeDtypeStruct((mesh.size, ROW_LEN), np.int32, sharding=sharding)
    params = abstract_params(decoder_specs(cfg), TRAIN, np.float32, mesh)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(functools.partial(total, remat=remat)))
        program = gradient.lower(params, tokens).compile()
    return str(program.as_text()), program.memory_analysis()


@pytest.mark.thorough
def test_fsdp_gathers_weights_sums_gradients_and_keeps_no_whole_copy():
    """XLA on CPU all-reduces gradients and slices; other backends may reduce-scatter."""
    cfg = resized(SMALL, L=16, stacked=True)
    n_bytes = 4 * count_params(decoder_specs(cfg))
    text, memory = compiled_gradient(cfg, "full", fsdp=8)
    assert re.search(r"\ball-gather\(", text)
    assert re.search(r"\b(all-reduce|reduce-scatter)\(", text)
    assert "all-to-all(" not in text and "collective-permute(" not in text
    assert memory.argument_size_in_bytes < n_bytes / 8 * 1.1
    assert memory.output_size_in_bytes < n_bytes / 8 * 1.1
    assert memory.temp_size_in_bytes < n_bytes / 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    "stacked",
    [pytest.param(False, id="list", marks=pytest.mark.slow), pytest.param(True, id="stacked")],
)
def test_remat_saves_the_memory_of_activations(stacked):
    cfg = dataclasses.replace(SMALL, stacked=stacked)
    temp = {
        remat: compiled_gradient(cfg, remat)[1].temp_size_in_bytes for remat in ("none", "full")
    }
    assert temp["full"] < 0.5 * temp["none"], temp
