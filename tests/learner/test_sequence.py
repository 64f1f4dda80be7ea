"""Sequence parallelism (Ulysses, ring) gives the same numbers as one device at every token."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.models.state_mixers import GatedDeltaNetConfig
from sharding import RING, TRAIN, ULYSSES, Rules
from tests.learner.tiny_policy import (
    HYBRID,
    LATENT,
    MODEL,
    all_numbers,
    batches,
    rollouts,
    run_config,
)
from tests.models.resized import resized

# Two micro-batches of four rows of 128 tokens. On 8 devices a zig-zag chunk has 8 tokens, a
# sequence 3 to 21.
BATCHES = batches(rollouts(40), row_len=128, token_budget=128, n_ranks=4)
CFG = run_config(old_logp="rollout", entropy_coef=0.01)
REMAT = run_config(dict(remat="full"), old_logp="rollout", entropy_coef=0.01)
PRESETS = {"ulysses": ULYSSES, "ring": RING, "both": dataclasses.replace(RING, ulysses=2)}
QUICK = [
    pytest.param("ulysses", dict(fsdp=2, sequence=2, tensor=2), marks=pytest.mark.thorough),
    ("ring", dict(replica=2, fsdp=2, sequence=2)),
    ("both", dict(fsdp=2, sequence=4)),
]
MORE = [
    ("ulysses", dict(sequence=2)),
    ("ulysses", dict(sequence=4)),
    ("ulysses", dict(replica=2, fsdp=2, sequence=2)),
    ("ring", dict(sequence=2)),
    ("ring", dict(sequence=4)),
    ("ring", dict(sequence=8)),
    ("ring", dict(fsdp=2, sequence=2, tensor=2)),
    ("both", dict(sequence=2)),
    ("both", dict(sequence=8)),
]


def numbers(rules: Rules, mesh: dict, model=MODEL):
    """`all_numbers` with rematerialization, which must not change them either."""
    return all_numbers(REMAT, BATCHES, mesh, model, rules)


@functools.cache
def alone(model=MODEL):
    return all_numbers(CFG, BATCHES, {}, model, TRAIN)


def assert_same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_sequences_cross_device_boundaries():
    batch = BATCHES[0]
    for n_chunks in (2, 4, 16):
        chunks = batch.segments.reshape(4, n_chunks, -1)
        crossing = (chunks[:, :-1, -1] == chunks[:, 1:, 0]) & (chunks[:, 1:, 0] > 0)
        assert crossing.any(), n_chunks


@pytest.mark.thorough
@pytest.mark.parametrize(("preset", "mesh"), QUICK, ids=str)
def test_time_sharded_rows_give_the_numbers_of_one_device(preset, mesh):
    assert_same(numbers(PRESETS[preset], mesh), alone())


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "mesh"), MORE, ids=str)
def test_every_mesh_gives_the_numbers_of_one_device(preset, mesh):
    assert_same(numbers(PRESETS[preset], mesh), alone())


FUSED = dataclasses.replace(
    HYBRID,
    layers=tuple(
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, fused=True))
        if isinstance(layer.mixer, GatedDeltaNetConfig)
        else layer
        for layer in HYBRID.layers
    ),
)
STATES = {name: (rules, dict(sequence=4)) for name, rules in PRESETS.items()}
STATES["tensor"] = TRAIN, dict(fsdp=2, tensor=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, HYBRID) for name in STATES), pytest.param("tensor", FUSED, id="tensor-fused")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_states_of_gated_deltanet_on_every_mesh(name, model):
    rules, mesh = STATES[name]
    assert_same(numbers(rules, mesh, model), alone(model))


@pytest.mark.thorough
@pytest.mark.parametrize("name", STATES)
def test_latent_attention_on_every_mesh(name):
    rules, mesh = STATES[name]
    assert_same(numbers(rules, mesh, LATENT), alone(LATENT))


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_windows_caps_and_stacked_layers_on_time_sharded_rows(preset):
    model = resized(
        MODEL, L=2, stacked=True, windows=(9, 0), attn_softcap=5.0, logit_softcap=10.0, qk_norm=True
    )
    got = numbers(PRESETS[preset], dict(fsdp=2, sequence=4), model)
    assert_same(got, alone(model))
