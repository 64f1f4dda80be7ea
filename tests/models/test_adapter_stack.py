"""Tokens of one forward pass that use different adapters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.adapter_stack import choose_adapters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import init_model
from jaxrl.models.lora import merge
from jaxrl.models.packed import forward_packed
from sharding.rules import TRAIN
from tests.engine.test_adapters import adapted, stack

TINY = DecoderConfig("llama", L=1, D=16, N=4, K=2, H=8, F=24, V=32)


@jax.jit
def hidden(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward_packed(model, tokens, jnp.ones_like(tokens), positions, rules=TRAIN)


@pytest.mark.parametrize("stacked", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_every_row_has_the_hidden_states_of_its_adapter(one_device, tmp_path, stacked):
    base = init_model(dataclasses.replace(TINY, stacked=stacked), seed=0, rules=TRAIN)
    models = adapted(base)
    both = stack(base, models, tmp_path, TRAIN)
    tokens = np.tile(np.arange(16, dtype=np.int32), (3, 1))
    ids = np.array([2, 0, 1], np.int32)[:, None] * np.ones_like(tokens)
    found = np.asarray(hidden(choose_adapters(both, jnp.asarray(ids)), tokens))
    for row, model in zip(found, (merge(models[1]), base, merge(models[0])), strict=True):
        np.testing.assert_allclose(row, np.asarray(hidden(model, tokens))[0], atol=1e-4)
    assert np.abs(found[0] - found[1]).max() > 0.1 < np.abs(found[2] - found[1]).max()
