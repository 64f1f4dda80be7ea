"""Tokens of one forward pass that use different adapters."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.adapter_stack import choose_adapters
from jaxrl.models.config import LoRA, uniform_decoder
from jaxrl.models.decoder import init_model
from jaxrl.models.files.adapter import save_adapter, warn_of_other_base
from jaxrl.models.files.adapter_stack import stack_adapters
from jaxrl.models.lora import merge
from jaxrl.models.packed import forward_packed
from sharding.rules import TRAIN
from tests.engine.test_adapters import ALL, stack, with_adapter
from tests.marks import graded
from tests.models.resized import resized

TINY = uniform_decoder("llama", L=1, D=16, N=4, K=2, H=8, F=24, V=32)


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


@jax.jit
def outputs(model, tokens, ids=None):
    """Hidden states and logits."""
    model = choose_adapters(model, ids)
    states = hidden(model, tokens)
    return states, model.logits(states, TRAIN)


EXPERTS = dict(family="mixtral", E=4, top_k=2, F_expert=16)
DORA = LoRA(2, 6.0, targets=("q_proj", "o_proj"), dora=True)
# Changes of the model, and two adapters of it.
CASES = {
    "dense": ({}, (LoRA(4, 8.0, targets=(*ALL, "embed_tokens", "lm_head")), DORA)),
    "experts": (EXPERTS, (LoRA(4, 8.0, targets=("w1", "w2", "w3", "q_proj")), DORA)),
}


@pytest.mark.parametrize(
    ("case", "stacked"),
    graded(itertools.product(CASES, (False, True)), default=[("dense", False)]),
)
def test_every_row_has_the_numbers_of_its_adapter(one_device, tmp_path, case, stacked):
    changes, loras = CASES[case]
    base = init_model(resized(TINY, stacked=stacked, **changes), seed=0, rules=TRAIN)
    models = [with_adapter(base, lora, seed) for seed, lora in enumerate(loras)]
    both = stack(base, models, tmp_path, TRAIN)
    tokens = np.tile(np.arange(16, dtype=np.int32), (3, 1))
    ids = np.array([2, 0, 1], np.int32)[:, None] * np.ones_like(tokens)
    found = outputs(both, tokens, ids)
    for row, model in enumerate((merge(models[1]), base, merge(models[0]))):
        for stage, want in zip(found, outputs(model, tokens), strict=True):
            np.testing.assert_allclose(stage[row], want[row], atol=1e-4)
    states = np.asarray(found[0])
    assert np.abs(states[0] - states[1]).max() > 0.1 < np.abs(states[2] - states[1]).max()


def test_adapters_of_experts_need_no_magnitudes(one_device, tmp_path):
    base = init_model(resized(TINY, **EXPERTS), seed=0, rules=TRAIN)
    experts = with_adapter(base, LoRA(2, 4.0, targets=("w1",)), 0)
    save_adapter(tmp_path, experts, base="base")
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(ValueError, match=r"experts \(w1\) have no magnitudes"):
        stack_adapters(base, [tmp_path], rules=TRAIN, dtype=jnp.float32)
