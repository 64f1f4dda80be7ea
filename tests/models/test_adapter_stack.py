"""Tokens of one forward pass that use different adapters."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.adapter_stack import choose_adapters
from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.decoder import init_model
from jaxrl.models.files.adapter import warn_of_other_base
from jaxrl.models.lora import add_adapters, merge
from jaxrl.models.packed import forward_packed
from sharding.rules import TRAIN
from tests.engine.test_adapters import adapted, stack

TINY = DecoderConfig("llama", L=1, D=16, N=4, K=2, H=8, F=24, V=32)


TABLES = dict(targets=("embed_tokens", "lm_head"))
EXPERTS = dict(family="mixtral", E=2, top_k=1, F_expert=16)


@pytest.mark.parametrize(
    ("lora", "changes", "what"),
    [
        (dict(targets=("q_proj",), dora=True), {}, "is a DoRA adapter"),
        (dict(targets=("w1",)), EXPERTS, "changes experts"),
        (TABLES, {}, "changes embeddings or the head"),
    ],
    ids=str,
)
def test_adapters_that_are_not_served_next_to_others_are_refused(
    one_device, tmp_path, lora, changes, what
):
    cfg = dataclasses.replace(TINY, **changes)
    base = init_model(cfg, seed=0, rules=TRAIN)
    model = add_adapters(base, LoRA(2, 4.0, **lora), seed=0, rules=TRAIN, dtype=jnp.float32)
    with pytest.raises(ValueError, match=rf"{what}.*merge it with python -m jaxrl\.convert"):
        stack(base, [model], tmp_path, TRAIN)


@pytest.mark.parametrize(("base", "warns"), [("hub/base-7b", False), ("hub/other-7b", True)])
def test_an_adapter_that_names_another_base_model_gets_a_warning(tmp_path, base, warns):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base-7b"}')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_other_base(tmp_path, base)
    assert ["trained on me/base-7b, but the model is" in str(w.message) for w in caught] == (
        [True] * warns
    )


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
