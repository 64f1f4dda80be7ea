"""Trainer and engine compute the same bits: a tiny Llama in a packed row and with a paged KV cache.

Tests of jaxrl/kernels/bits.py. Requirements: float32 attention scores, [out, in] weights, segments
that start on multiples of 64, and at least two rows in every matrix product.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.bits import ROUND_AS_WRITTEN, rsqrt
from jaxrl.kernels.logprob import token_scores
from jaxrl.models.config import DecoderConfig, uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.kv_cache import init_cache
from jaxrl.models.packed import forward_packed
from jaxrl.models.paged import forward_paged
from jaxrl.models.spec import init_params
from sharding import TRAIN
from tests.kernels.engine_logp import engine_logp

pytestmark = pytest.mark.bitwise

jit = functools.partial(jax.jit, compiler_options=ROUND_AS_WRITTEN)

B, S, CHUNK, PREFILLED = 3, 100, 32, 64
LLAMAS = {
    "gqa": uniform_decoder("llama", L=2, D=64, N=4, K=2, H=16, F=128, V=300, tied=True),
    "mha": uniform_decoder("llama", L=2, D=96, N=3, K=3, H=32, F=200, V=512),
}


def tiny(cfg: DecoderConfig, dtype=jnp.float32):
    """Random weights, large enough that attention is not flat."""
    model = init_params(jax.random.key(0), decoder_specs(cfg), TRAIN, dtype)
    model = jax.tree.map(lambda w: w * 5 if w.ndim > 1 else w, model)
    tokens = np.random.default_rng(0).integers(0, cfg.V, (B, S)).astype(np.int32)
    return model, tokens


def pack(tokens: np.ndarray) -> tuple[jax.Array, ...]:
    """Tokens, segments and positions of one row, padded to the next multiple of 64."""
    segments = np.pad(np.ones_like(tokens), ((0, 0), (0, -S % 64))) * np.arange(1, B + 1)[:, None]
    positions = np.tile(np.arange(S + -S % 64), (B, 1))
    rows = np.pad(tokens, ((0, 0), (0, -S % 64))), segments, positions
    return tuple(jnp.asarray(x.reshape(1, -1), jnp.int32) for x in rows)


def unpack(row: jax.Array) -> np.ndarray:
    """[1, B * aligned, ...] -> [B, S, ...]"""
    return np.asarray(row).reshape(B, -1, *row.shape[2:])[:, :S]


def score_packed(model, row):
    hidden = forward_packed(model, *row, rules=TRAIN)
    return model.logits(hidden, TRAIN)


def score_paged(model, cfg: DecoderConfig, tokens: np.ndarray, dtype=jnp.float32) -> np.ndarray:
    """Logits [B, S, V]: two chunks of prefill, then one token per step, in scattered pages."""
    table = jnp.array([[4, 1], [0, 6], [5, 3]], jnp.int32)
    cache = init_cache(cfg, 7, 64, dtype, TRAIN)

    @functools.partial(jit, donate_argnums=1)
    def step(model, cache, tokens, positions):
        hidden, cache = forward_paged(model, tokens, positions, cache, {0: table}, rules=TRAIN)
        return model.logits(hidden, TRAIN), cache

    starts = [*range(0, PREFILLED, CHUNK), *range(PREFILLED, S)]
    logits = []
    for start, end in zip(starts, [*starts[1:], S], strict=True):
        positions = np.tile(np.arange(start, end, dtype=np.int32), (B, 1))
        chunk, cache = step(model, cache, tokens[:, start:end], positions)
        logits.append(chunk)
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("name", ["gqa", pytest.param("mha", marks=pytest.mark.thorough)])
def test_logits_from_pages_are_bitwise_those_of_the_packed_row(one_device, name):
    model, tokens = tiny(LLAMAS[name])
    trained = jit(score_packed)(model, pack(tokens))
    np.testing.assert_array_equal(score_paged(model, LLAMAS[name], tokens), unpack(trained))


@pytest.mark.thorough
def test_processors_with_narrower_vectors_give_equal_bits_too():
    """XLA contracts other products there. On such a processor this repeats the test above."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX2"
    test = test_logits_from_pages_are_bitwise_those_of_the_packed_row.__name__
    subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-q", "-m", "bitwise", f"{__file__}::{test}[gqa]"],
        env=os.environ | {"XLA_FLAGS": flags},
        check=True,
    )


@pytest.mark.thorough
def test_bfloat16_logits_are_bitwise_equal_too(one_device):
    model, tokens = tiny(LLAMAS["gqa"], jnp.bfloat16)
    trained = jit(score_packed)(model, pack(tokens))
    paged = score_paged(model, LLAMAS["gqa"], tokens, jnp.bfloat16)
    np.testing.assert_array_equal(paged, unpack(trained))


def test_logprobs_of_the_update_are_those_of_the_engine(one_device):
    """Scoring gives the same bits; inside value_and_grad, other fusions differ by at most 1e-6."""
    cfg = LLAMAS["gqa"]
    model, tokens = tiny(cfg)
    row = pack(tokens)
    targets = jnp.roll(row[0], -1, axis=1)

    def logp(model):
        hidden = forward_packed(model, *row, rules=TRAIN, remat="full")
        out, *_ = token_scores(
            hidden, model.unembed, targets, temperature=0.8, chunk=100, rules=TRAIN
        )
        return jnp.sum(out), out

    logits = score_paged(model, cfg, tokens)
    engine = jit(engine_logp)(
        logits.reshape(-1, cfg.V) / jnp.float32(0.8), unpack(targets).reshape(-1)
    )
    engine = np.asarray(engine).reshape(B, S)
    np.testing.assert_array_equal(unpack(jit(logp)(model)[1]), engine)
    (_, trained), _ = jit(jax.value_and_grad(logp, has_aux=True))(model)
    np.testing.assert_allclose(unpack(trained), engine, rtol=0, atol=1e-6)


def test_rsqrt_is_exact_for_one_number_and_for_many():
    x = np.random.default_rng(0).random(8192, np.float32) + np.float32(0.01)
    want = np.float32(1) / np.sqrt(x)
    for n in (1, 3, 64, 8192):
        np.testing.assert_array_equal(jax.jit(rsqrt)(x[:n]), want[:n])
