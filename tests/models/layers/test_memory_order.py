"""Packed rows of TPU, whose projections are stored for splash attention, have the same numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.config import AttentionConfig, DecoderConfig, uniform_decoder
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.layers import rope
from jaxrl.models.layers.attention import has_plain_heads
from jaxrl.models.layers.memory_order import row_major, row_major_gradient
from jaxrl.models.packed import PackedRows, forward_packed
from jaxrl.models.rope_config import Rope
from jaxrl.models.spec import abstract_params, init_params
from sharding import PIPELINE, TRAIN, Rules, make_mesh
from tests.models.test_remat import operations

T = 16


def tiny(family: str, L: int = 1, **options) -> DecoderConfig:
    return uniform_decoder(family, L=L, D=32, N=4, K=2, H=8, F=32, V=64, tied=True, **options)


def loss(model: Decoder, rules: Rules = TRAIN) -> jax.Array:
    tokens = jnp.arange(2 * T, dtype=jnp.int32).reshape(2, T)
    hidden = forward_packed(model, tokens, jnp.ones_like(tokens), tokens % T, rules=rules)
    return jnp.sum(hidden.astype(jnp.float32) ** 2)


@pytest.mark.parametrize("identity", [row_major, row_major_gradient])
def test_values_and_gradients_of_another_order_are_the_same(identity):
    with jax.set_mesh(make_mesh(jax.devices()[:4], fsdp=2, tensor=2)):
        x = jnp.arange(2 * 3 * 4 * 8, dtype=jnp.float32).reshape(2, 3, 4, 8)
        x = jax.reshard(x, TRAIN.spec("batch", "time", "heads", None))
        out, pull = jax.vjp(identity, x)
        np.testing.assert_array_equal(out, x)
        np.testing.assert_array_equal(pull(2 * x)[0], 2 * x)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cfg", "rules", "sizes"),
    [
        (tiny("qwen3", qk_norm=True), TRAIN, dict(fsdp=2, tensor=2)),
        (dataclasses.replace(tiny("llama", L=2), stacked=True), PIPELINE, dict(fsdp=2, stage=2)),
    ],
)
def test_rows_with_heads_first_have_the_same_bits(cfg, rules, sizes, monkeypatch):
    """Loss and gradients, with rope as on TPU."""
    monkeypatch.setattr(rope, "target_platform", lambda: "tpu")
    results = []
    with jax.set_mesh(make_mesh(jax.devices()[:4], **sizes)):
        model = init_params(jax.random.key(0), decoder_specs(cfg), rules, jnp.bfloat16)
        for first in (False, True):
            monkeypatch.setattr(PackedRows, "heads_first", first)
            results.append(jax.jit(jax.value_and_grad(lambda model: loss(model, rules)))(model))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_only_products_of_tpu_are_stored_in_another_order(one_device, monkeypatch):
    model = abstract_params(decoder_specs(tiny("llama")), TRAIN, jnp.bfloat16)

    def n_constraints() -> int:
        return operations(jax.grad(loss), model)["layout_constraint"]

    assert n_constraints() == 0
    monkeypatch.setattr(PackedRows, "heads_first", True)
    # q, k and v and their gradients, and the gradient of attention's output
    assert n_constraints() == 2 * 3 + 1


def test_only_plain_heads_are_stored_in_another_order():
    plain = AttentionConfig(4, 2, 8)
    assert has_plain_heads(plain)
    assert has_plain_heads(dataclasses.replace(plain, qk_norm=True, gate=True))
    others = [
        dict(qkv_bias=True),
        dict(qkv_fused=True),
        dict(rope=Rope(rotary=0.5)),
        dict(rope=Rope(interleaved=True)),
    ]
    for options in others:
        assert not has_plain_heads(dataclasses.replace(plain, **options))
