"""Random initialization gives the same numbers on every mesh and in both layer layouts.

Tests of jaxrl/models/spec.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import Decoder, init_model
from jaxrl.models.mesh_check import check_mesh
from sharding import TRAIN, make_mesh
from tests.models.resized import resized

CFG = uniform_decoder("qwen2", L=2, D=16, N=4, K=2, H=8, F=32, V=64, qkv_bias=True)


def by_name(model: Decoder, layer: int) -> dict[str, np.ndarray]:
    """Host copies of one layer's parameters and of the embeddings."""
    layers = model.layers if model.cfg.stacked else model.layers[layer]
    picked = jax.tree.map(lambda x: x[layer], layers) if model.cfg.stacked else layers
    flat = jax.tree_util.tree_leaves_with_path((picked, model.embed, model.lm_head))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


@pytest.mark.thorough
def test_list_and_stacked_layers_start_from_the_same_numbers(one_device):
    listed = init_model(CFG, seed=1, rules=TRAIN)
    stacked = init_model(dataclasses.replace(CFG, stacked=True), seed=1, rules=TRAIN)
    for layer in range(CFG.L):
        a, b = by_name(listed, layer), by_name(stacked, layer)
        assert a.keys() == b.keys() and len(a) == 14  # 9 weights, 3 biases, 2 embeddings
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert not np.array_equal(
        by_name(listed, 0)["[0].mlp.up.w"], by_name(listed, 1)["[0].mlp.up.w"]
    )


@pytest.mark.thorough
def test_a_stack_of_one_layer_keeps_its_layer_axis(one_device):
    model = init_model(resized(CFG, L=1, stacked=True), seed=1, rules=TRAIN)
    assert model.layers.mlp.up.w.shape == (1, 32, CFG.D)


@pytest.mark.thorough
def test_a_mesh_changes_the_shards_and_not_the_numbers():
    with jax.set_mesh(make_mesh()):
        alone = init_model(CFG, seed=3, rules=TRAIN)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        spread = init_model(CFG, seed=3, rules=TRAIN)
        weight = spread.layers[0].mlp.up.w
        assert weight.sharding.spec == jax.P("tensor", "fsdp")
        assert weight.addressable_shards[0].data.shape == (16, CFG.D // 4)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_bfloat16_numbers_are_the_rounded_float32_ones(one_device):
    full = init_model(CFG, seed=1, rules=TRAIN)
    half = init_model(CFG, seed=1, rules=TRAIN, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(
        np.asarray(full.embed.astype(jnp.bfloat16)), np.asarray(half.embed)
    )


def test_a_mesh_that_does_not_divide_the_heads_is_one_clear_error():
    check_mesh(CFG, {"fsdp": 4, "tensor": 2})
    with pytest.raises(ValueError, match=r"2 kv heads over tensor=4.*config\.mesh"):
        check_mesh(CFG, {"fsdp": 1, "tensor": 4})
    with pytest.raises(ValueError, match=r"16 model features over fsdp=3"):
        check_mesh(CFG, {"fsdp": 3, "tensor": 1})
