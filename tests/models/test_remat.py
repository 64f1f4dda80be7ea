"""Activations that the backward pass of the decoder keeps, and the order in which it runs.

Tests of `run_layers` in jaxrl/models/layer_loop.py, and of jaxrl/models/layers/mlp.py.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn

from jaxrl.models import layer_loop
from jaxrl.models.config import DecoderConfig, uniform_decoder
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.layers import mlp
from jaxrl.models.packed import forward_packed
from jaxrl.models.spec import init_params
from sharding import TRAIN

CFG = uniform_decoder("llama", L=2, D=64, N=4, K=2, H=16, F=128, V=96, tied=True)
T = 64


def new_model(cfg: DecoderConfig = CFG) -> Decoder:
    return init_params(jax.random.key(0), decoder_specs(cfg), TRAIN, jnp.float32)


def loss(model: Decoder, remat: str = "full") -> jax.Array:
    tokens = jnp.arange(T, dtype=jnp.int32)[None]
    hidden = forward_packed(model, tokens, jnp.ones_like(tokens), tokens, rules=TRAIN, remat=remat)
    return jnp.sum(hidden**2)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a program, those of inner programs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if isinstance(inner, Jaxpr):
                    yield from equations(inner)


def operations(fn: Callable, *args) -> collections.Counter[str]:
    """How often a traced program has each primitive."""
    traced = jax.make_jaxpr(fn)(*args).jaxpr
    return collections.Counter(eqn.primitive.name for eqn in equations(traced))


def test_a_policy_recomputes_only_what_it_does_not_keep(one_device):
    model = new_model()
    products = {
        remat: operations(jax.grad(lambda model: loss(model, remat=remat)), model)["dot_general"]  # noqa: B023
        for remat in ("none", "dots", "mlp", "attention", "full", "full?first=1")
    }
    # per layer: "mlp" computes q, k, v and o again; "attention" also gate and up; "full" also two
    # products of attention. The product with the last matrix, down, is never needed again.
    extra = {"none": 0, "dots": 0, "mlp": CFG.L * 4, "attention": CFG.L * (4 + 2)}
    extra |= {"full": CFG.L * (4 + 2 + 2), "full?first=1": 4 + 2 + 2}
    assert {remat: n - products["none"] for remat, n in products.items()} == extra


def test_barriers_are_only_in_programs_with_a_backward_pass(one_device, monkeypatch):
    model = new_model()
    forward = operations(loss, model)["optimization_barrier"]
    backward = operations(jax.grad(loss), model)["optimization_barrier"]
    monkeypatch.setattr(layer_loop, "finish_gradients", lambda x, layer: (x, layer))
    assert operations(loss, model)["optimization_barrier"] == forward
    without_tie = operations(jax.grad(loss), model)["optimization_barrier"]
    assert backward - without_tie == CFG.L  # the gradient of each layer's input waits once
    monkeypatch.setattr(mlp, "share_backward", lambda gate, up: (gate, up))
    assert operations(loss, model)["optimization_barrier"] == forward
    # per layer: in forward, recomputed, and for the gradients
    without_any = operations(jax.grad(loss), model)["optimization_barrier"]
    assert without_tie - without_any == CFG.L * 3


@pytest.mark.thorough
@pytest.mark.bitwise
def test_barriers_change_no_bit_of_a_gradient(one_device, monkeypatch):
    model = new_model()
    ordered = jax.jit(jax.grad(loss))(model)
    monkeypatch.setattr(layer_loop, "finish_gradients", lambda x, layer: (x, layer))
    monkeypatch.setattr(mlp, "share_backward", lambda gate, up: (gate, up))
    free = jax.jit(jax.grad(lambda model: loss(model)))(model)
    jax.tree.map(np.testing.assert_array_equal, ordered, free)


STACKED = dataclasses.replace(CFG, stacked=True)
SPECS = ("full", "offload", "attention", "mlp", "dots", "full?first=1", "attention?group=2")


def gradient(cfg: DecoderConfig, remat: str) -> Decoder:
    return jax.jit(jax.grad(functools.partial(loss, remat=remat)))(new_model(cfg))


def assert_same_bits(a: Decoder, b: Decoder) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_the_layers_of_a_period_finish_their_gradients_one_after_the_other(one_device, monkeypatch):
    biased = dataclasses.replace(CFG.layers[0].mixer, qkv_bias=True)
    period = CFG.layers[0], dataclasses.replace(CFG.layers[0], mixer=biased)
    cfg = dataclasses.replace(STACKED, layers=period * 2)
    assert [len(run) for run in cfg.runs] == [2]
    model = new_model(cfg)
    ordered = operations(jax.grad(loss), model)["optimization_barrier"]
    monkeypatch.setattr(layer_loop, "finish_gradients", lambda x, layer: (x, layer))
    free = operations(jax.grad(loss), model)["optimization_barrier"]
    assert ordered - free == 2  # in the body of the scan


@pytest.mark.thorough
@pytest.mark.bitwise
def test_layer_inputs_in_host_memory_give_the_same_bits(one_device):
    assert_same_bits(gradient(STACKED, "offload?group=2"), gradient(STACKED, "none"))


def test_offloaded_layer_inputs_are_copied_to_host_memory_and_back(one_device):
    moved = jax.make_jaxpr(jax.grad(functools.partial(loss, remat="offload")))(new_model(STACKED))
    assert str(moved).count("device_put") >= 2 and "Host" in str(moved)


@pytest.mark.slow
@pytest.mark.bitwise
@pytest.mark.parametrize("cfg", [CFG, STACKED], ids=["list", "stacked"])
def test_no_policy_changes_a_bit_of_a_gradient(cfg, one_device):
    want = gradient(cfg, "none")
    for remat in SPECS:
        assert_same_bits(gradient(cfg, remat), want)
