"""Quantized products in training (learner.matmul_dtype): logits, gradients and meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import init_model
from jaxrl.models.packed import forward_packed
from sharding import make_mesh
from sharding.rules import PIPELINE, TENSOR, TRAIN, ULYSSES
from tests.marks import graded

TINY = DecoderConfig("llama", L=2, D=32, N=4, K=2, H=8, F=64, V=64)
RULES = dict(tensor=TENSOR, sequence=ULYSSES, stage=PIPELINE)  # by the last axis of a mesh
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 16))


def larger(path, w):
    """Matrices with a standard deviation of 0.1, not 0.02."""
    return w if "norm" in jax.tree_util.keystr(path) else 5 * w


def numbers(kind, sizes, *, remat="none"):
    """(logits, gradients) on a mesh, on the host."""
    stacked, rules = "stage" in sizes, RULES.get(next(reversed(sizes), ""), TRAIN)
    with jax.set_mesh(make_mesh(**sizes)):
        model = init_model(dataclasses.replace(TINY, stacked=stacked), seed=0, rules=rules)
        model = jax.tree.map_with_path(larger, model)
        positions = jnp.broadcast_to(jnp.arange(16), TOKENS.shape)

        @jax.jit
        def run(model):
            def logits(model):
                tokens, ones = jnp.asarray(TOKENS, jnp.int32), jnp.ones(TOKENS.shape, jnp.int32)
                hidden = forward_packed(
                    model, tokens, ones, positions, rules=rules, remat=remat, matmul_dtype=kind
                )
                return model.logits(hidden, rules)

            out, backward = jax.vjp(logits, model)
            return out, backward(jnp.cos(out))[0]

        out, grads = jax.device_get(run(model))
    if stacked:  # to the list of layers of the other cases
        layers = [jax.tree.map(lambda w, i=i: w[i], grads.layers) for i in range(TINY.L)]
        grads = grads.embed, layers, grads.lm_head, grads.norm
    return out, jax.tree.leaves(grads)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_products_change_logits_and_gradients_a_little(kind):
    (want, want_grads), (found, grads) = numbers("auto", {}), numbers(kind, {})
    assert found.dtype == np.float32 and np.any(found != want)
    assert np.linalg.norm(found - want) < 0.1 * np.linalg.norm(want)
    for a, b in zip(grads, want_grads, strict=True):
        assert np.sum(a * b) > 0.97 * np.linalg.norm(a) * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("kind", "sizes", "remat"),
    graded(
        [
            ("int8", dict(fsdp=2, tensor=2), "full"),
            ("fp8", dict(replica=2, fsdp=2, tensor=2), "none"),
            ("int8", dict(fsdp=2, sequence=2), "dots"),
            ("int8", dict(stage=2), "none"),
        ],
        thorough=(),
    ),
)
def test_a_mesh_changes_quantized_products_by_rounding_only(kind, sizes, remat):
    (want, want_grads), (found, grads) = numbers(kind, {}), numbers(kind, sizes, remat=remat)
    # A number at the middle of two steps of int8 may be rounded to the other one.
    assert np.linalg.norm(found - want) < 1e-3 * np.linalg.norm(want)
    for a, b in zip(grads, want_grads, strict=True):
        assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b)
