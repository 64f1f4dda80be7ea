"""What the backward pass of the decoder keeps, and in which order it runs.

Tests of `run_layers` in jaxrl/models/decoder.py, and of jaxrl/models/layers/mlp.py.
"""

import collections
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn

from jaxrl.models import decoder
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.layers import mlp
from jaxrl.models.packed import forward_packed
from jaxrl.models.spec import init_params
from sharding import TRAIN

CFG = DecoderConfig("llama", L=2, D=64, N=4, K=2, H=16, F=128, V=96, tied=True)
T = 64


def new_model() -> Decoder:
    return init_params(jax.random.key(0), decoder_specs(CFG), TRAIN, jnp.float32)


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
        for remat in ("none", "dots", "mlp", "full")
    }
    # per layer: "mlp" computes q, k, v and o again; "full" also gate, up, and two products of
    # attention. The product with the last matrix, down, is never needed again.
    extra = {"none": 0, "dots": 0, "mlp": CFG.L * 4, "full": CFG.L * (4 + 2 + 2)}
    assert {remat: n - products["none"] for remat, n in products.items()} == extra


def test_barriers_are_only_in_programs_with_a_backward_pass(one_device, monkeypatch):
    model = new_model()
    forward = operations(loss, model)["optimization_barrier"]
    backward = operations(jax.grad(loss), model)["optimization_barrier"]
    monkeypatch.setattr(decoder, "finish_gradients", lambda x, layer: (x, layer))
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
    monkeypatch.setattr(decoder, "finish_gradients", lambda x, layer: (x, layer))
    monkeypatch.setattr(mlp, "share_backward", lambda gate, up: (gate, up))
    free = jax.jit(jax.grad(lambda model: loss(model)))(model)
    jax.tree.map(np.testing.assert_array_equal, ordered, free)
