"""Quantized products (learner.matmul_dtype) and MLPs in chunks of tokens (learner.mlp_chunk) in
training: logits, gradients, meshes and memory."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.config import LoRA, uniform_decoder
from jaxrl.models.decoder import init_model
from jaxrl.models.packed import forward_packed
from sharding import make_mesh
from sharding.rules import PIPELINE, TENSOR, TRAIN, ULYSSES
from tests.marks import graded
from tests.models.resized import resized

TINY = uniform_decoder("llama", L=2, D=32, N=4, K=2, H=8, F=64, V=64)
RULES = dict(tensor=TENSOR, sequence=ULYSSES, stage=PIPELINE)  # by the last axis of a mesh
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 16))


def larger(path, w):
    """Matrices with a standard deviation of 0.1, not 0.02; random codes, with scales of 0.1."""
    name = jax.tree_util.keystr(path)
    if w.dtype == jnp.uint8:
        codes = np.random.default_rng(0).integers(0, 256, w.shape, np.uint8)
        return jax.device_put(codes, w.sharding)
    if "norm" in name:
        return w
    return 0.1 * w if "scale" in name else 5 * w


def numbers(kind, sizes, *, remat="none", chunk=0, cfg=TINY, dtype="float32"):
    """(logits, gradients) on a mesh, on the host."""
    stacked, rules = "stage" in sizes, RULES.get(next(reversed(sizes), ""), TRAIN)
    with jax.set_mesh(make_mesh(**sizes)):
        cfg = dataclasses.replace(cfg, stacked=stacked)
        model = init_model(cfg, seed=0, rules=rules, dtype=jnp.dtype(dtype))
        model = jax.tree.map_with_path(larger, model)
        positions = jnp.broadcast_to(jnp.arange(16), TOKENS.shape)

        @jax.jit
        def run(model):
            def logits(model):
                tokens, ones = jnp.asarray(TOKENS, jnp.int32), jnp.ones(TOKENS.shape, jnp.int32)
                hidden = forward_packed(
                    model,
                    tokens,
                    ones,
                    positions,
                    rules=rules,
                    remat=remat,
                    matmul_dtype=kind,
                    mlp_chunk=chunk,
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


EXPERTS = resized(TINY, family="qwen3_moe", E=4, top_k=2, F_expert=32)
ADAPTED = LoRA(2, 4.0, dora=True, pissa=True, targets=("gate_proj", "down_proj"))
CHUNKED = {
    "tensor": dict(sizes=dict(fsdp=2, tensor=2), remat="full"),
    "one device": dict(sizes={}),
    "replica": dict(sizes=dict(replica=2, fsdp=2, tensor=2), remat="mlp"),
    "sequence": dict(sizes=dict(fsdp=2, sequence=2), remat="dots"),
    "stage": dict(sizes=dict(stage=2), remat="full"),
    "adapters": dict(sizes=dict(fsdp=2), cfg=dataclasses.replace(TINY, lora=ADAPTED)),
    "nf4": dict(sizes=dict(fsdp=2), cfg=dataclasses.replace(TINY, lora=ADAPTED, base_dtype="nf4")),
    "experts": dict(sizes=dict(fsdp=2, expert=2), cfg=EXPERTS),
}


@pytest.mark.bitwise
@pytest.mark.parametrize("case", graded(CHUNKED, default=["one device"], thorough=["tensor"]))
def test_mlps_in_chunks_give_the_same_logits_and_gradients(case):
    """The logits bit by bit without adapters; the gradients up to the order of sums."""
    case = CHUNKED[case]
    n_ranks = math.prod(case["sizes"].values()) // case["sizes"].get("tensor", 1)
    chunk = TOKENS.size // n_ranks // 3  # four chunks: three would not divide 16 positions
    want, want_grads = numbers("auto", **case)
    found, grads = numbers("auto", **case, chunk=chunk)
    # The norms of a magnitude (DoRA) are sums that XLA orders differently in each program.
    tolerance, of_gradients = (1e-5, 3e-6) if case.get("cfg", TINY).lora else (0, 1e-6)
    np.testing.assert_allclose(found, want, rtol=0, atol=tolerance)
    assert len(grads) == len(want_grads)
    for a, b in zip(grads, want_grads, strict=True):
        if np.issubdtype(a.dtype, np.floating):  # frozen int8 and nf4 have none
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=of_gradients * np.abs(b).max())


@pytest.mark.slow
def test_gradients_of_bfloat16_chunks_are_as_exact_as_those_of_one_product():
    """Their sum over 16 chunks is in float32."""
    exact = numbers("auto", {})[1]

    def error(**options):
        found = numbers("auto", {}, dtype="bfloat16", **options)[1]
        wrong = [np.linalg.norm(a - b) for a, b in zip(found, exact, strict=True)]
        return sum(wrong) / sum(map(np.linalg.norm, exact))

    assert error(chunk=8) < 1.05 * error()


@pytest.mark.thorough
def test_the_memory_of_an_mlp_is_that_of_a_chunk(one_device):
    cfg = resized(TINY, L=1, F=1024)

    def temporaries(chunk: int) -> int:
        ones = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

        def loss(model, tokens):
            hidden = forward_packed(
                model, tokens, tokens, tokens, rules=TRAIN, remat="full", mlp_chunk=chunk
            )
            return jnp.sum(hidden**2)

        model = jax.eval_shape(lambda: init_model(cfg, seed=0, rules=TRAIN))
        compiled = jax.jit(jax.grad(loss)).lower(model, ones).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = 4096 * 1024 * 4  # bytes of one array [T, F]; backward has several
    assert temporaries(0) - temporaries(512) > 2 * whole
    assert temporaries(512) - temporaries(256) > 2 * 256 * 1024 * 4
