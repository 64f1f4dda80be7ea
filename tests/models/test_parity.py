"""Logits against Hugging Face's torch models, on the tiny checkpoints of scripts/make_golden.py.

Tests of jaxrl/models/decoder.py, jaxrl/models/families/ and jaxrl/models/layers/.
"""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.learner.router import balance_loss
from jaxrl.models.config import ClampedGLU, LayerConfig, MoEConfig
from jaxrl.models.decoder import Decoder, decoder_specs, restrict
from jaxrl.models.files.hf_load import load_model
from jaxrl.models.packed import forward_packed, forward_routed
from jaxrl.models.rope_config import Rope
from jaxrl.models.spec import is_spec
from sharding import TRAIN
from tests.marks import graded
from tests.models.resized import resized

GOLDEN = Path(__file__).parent / "golden"
MODELS = sorted(path.name for path in GOLDEN.iterdir())
FAMILIES = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe"}
FAMILIES |= {"qwen3_5", "qwen3_next", "cohere2", "glm4", "glm4_moe", "gpt_oss", "deepseek_v3"}
FAMILIES |= {"gemma4_shared", "lfm2"}


def golden(name: str) -> tuple[jax.Array, np.ndarray]:
    """(tokens [B, T], torch's logits [B, T, V])."""
    saved = np.load(GOLDEN / name / "golden.npz")
    return jnp.asarray(saved["tokens"]), saved["logits"]


@jax.jit
def packed_logits(model: Decoder, tokens: jax.Array, segments: jax.Array, positions: jax.Array):
    return model.logits(forward_packed(model, tokens, segments, positions, rules=TRAIN), TRAIN)


@pytest.mark.parametrize(
    ("name", "stacked"),
    graded(
        itertools.product(MODELS, (False, True)),
        # Gemma's many layers compile faster when stacked.
        default=[(name, name.startswith("gemma")) for name in MODELS if name in FAMILIES],
    ),
)
def test_logits_equal_those_of_transformers(name, stacked, one_device):
    tokens, expected = golden(name)
    _, model = load_model(GOLDEN / name, rules=TRAIN, stacked=stacked)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = packed_logits(model, tokens, jnp.ones_like(tokens), positions)
    np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", graded(MODELS, default=["qwen2", "mixtral"]))
def test_packed_segments_give_the_logits_of_single_rows(name, one_device):
    tokens, expected = golden(name)
    first, second = 23, 14  # tokens of the two rows; 3 tokens of padding follow
    padding = jnp.zeros(3, jnp.int32)
    row = jnp.concatenate([tokens[0, :first], tokens[1, :second], padding])
    segments = jnp.array([1] * first + [2] * second + [0] * 3)
    positions = jnp.concatenate([jnp.arange(first), jnp.arange(second), padding])
    _, model = load_model(GOLDEN / name, rules=TRAIN)
    logits = np.asarray(packed_logits(model, row[None], segments[None], positions[None]))[0]
    np.testing.assert_allclose(logits[:first], expected[0, :first], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(
        logits[first : first + second], expected[1, :second], atol=1e-4, rtol=1e-4
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "qwen3_moe_plain", "qwen3_5_moe", "qwen3_next", "gpt_oss"]
)
def test_the_load_balancing_loss_is_that_of_transformers(name, one_device):
    """Also for packed rows with padding; torch computed two separate rows of 40 tokens."""
    tokens, _ = golden(name)
    _, model = load_model(GOLDEN / name, rules=TRAIN)
    row = jnp.concatenate([tokens[0], jnp.zeros(3, jnp.int32), tokens[1], jnp.zeros(5, jnp.int32)])
    segments = jnp.array([1] * 40 + [0] * 3 + [2] * 40 + [0] * 5)
    positions = jnp.concatenate([jnp.arange(n) for n in (40, 3, 40, 5)])
    routed = jax.jit(functools.partial(forward_routed, rules=TRAIN))
    _, load = routed(model, row[None], segments[None], positions[None])
    layers = model.cfg.expert_layers
    assert load.count.sum() == len(layers) * 80 * layers[0].top_k  # 80 tokens
    expected = np.load(GOLDEN / name / "golden.npz")["aux_loss"]
    np.testing.assert_allclose(float(balance_loss(load, load)), expected, rtol=1e-5)


YARN_WITHOUT_FACTOR = Rope(theta=500.0, kind="yarn", factor=4.0, original_len=32)
PLAIN = [
    ("llama", dict(rope=Rope())),
    ("llama3_rope", dict(rope=Rope())),
    ("llama_linear_rope", dict(rope=Rope())),
    ("llama_yarn_rope", dict(rope=Rope())),
    ("llama_yarn_rope", dict(rope=YARN_WITHOUT_FACTOR)),
    ("qwen2", dict(windows=())),
    ("mistral", dict(windows=())),
    ("gemma2", dict(windows=())),
    ("gemma2", dict(attn_softcap=None)),
    ("gemma2", dict(attn_scale=None)),
    ("gemma3", dict(local_rope=None)),
    ("gemma3", dict(embed_scale=1.0)),
    ("mixtral", dict(top_k=1)),
    ("mixtral", dict(windows=())),
    ("qwen3_moe", dict(norm_topk=False)),
    ("qwen3_moe_plain", dict(norm_topk=True)),
    ("glm4", dict(rope=Rope(theta=300.0, rotary=0.5))),  # pairs of halves
    ("phi3", dict(local_rope=Rope(theta=300.0, rotary=0.5))),  # every layer has a window
    ("olmo3", dict(local_rope=None)),
    ("smollm3", {}),  # all layers with a rotary embedding
    ("granite", dict(embed_scale=1.0)),
    ("granite", dict(residual_scale=1.0)),
    ("granite", dict(logit_scale=1.0)),
    ("cohere2", dict(rope=Rope(interleaved=True))),  # in the layer without a window too
    ("cohere2", dict(layer_norm=False)),
]


@pytest.mark.parametrize(
    ("name", "plain"),
    graded(PLAIN, default=[("mistral", dict(windows=())), ("mixtral", dict(top_k=1))]),
)
def test_the_checkpoints_depend_on_each_field_of_their_family(name, plain, one_device):
    """With one field reset to its default the logits differ, so parity tests that field."""
    tokens, expected = golden(name)
    cfg, model = load_model(GOLDEN / name, rules=TRAIN)
    other = decoder_specs(resized(cfg, **plain))
    layout = jax.tree.structure(other, is_leaf=is_spec)
    model = jax.tree.unflatten(layout, jax.tree.leaves(model))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = packed_logits(model, tokens, jnp.ones_like(tokens), positions)
    assert np.abs(np.asarray(logits) - expected).max() > 0.05


ROUTERS = [
    dict(top_k=2),
    dict(norm=False),
    dict(scale=1.0),
    dict(n_groups=1, top_groups=1),
    dict(top_groups=3),
    dict(score="softmax"),
    dict(correction=False),
]


@pytest.mark.parametrize("plain", graded(ROUTERS, thorough=[dict(top_groups=3)]), ids=str)
def test_the_checkpoint_of_glm_depends_on_each_field_of_its_router(plain, one_device):
    tokens, expected = golden("glm4_moe")
    cfg, model = load_model(GOLDEN / "glm4_moe", rules=TRAIN)
    ffn = cfg.layers[-1].ffn
    assert isinstance(ffn, MoEConfig)
    ffn = dataclasses.replace(ffn, router=dataclasses.replace(ffn.router, **plain))
    layers = (cfg.layers[0], *(dataclasses.replace(layer, ffn=ffn) for layer in cfg.layers[1:]))
    other = restrict(model, dataclasses.replace(cfg, layers=layers))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = packed_logits(other, tokens, jnp.ones_like(tokens), positions)
    assert np.abs(np.asarray(logits) - expected).max() > 0.05


GPT_OSS = {
    "sinks": (dict(sinks=False), {}),
    "limit": ({}, dict(act=ClampedGLU(limit=7.0))),
    "alpha": ({}, dict(act=ClampedGLU(limit=1.5, alpha=1.0))),
    "bias": ({}, dict(bias=False)),
}


@pytest.mark.parametrize("name", graded(GPT_OSS, default=["sinks"]))
def test_the_checkpoint_of_gpt_oss_depends_on_each_of_its_fields(name, one_device):
    tokens, expected = golden("gpt_oss")
    cfg, model = load_model(GOLDEN / "gpt_oss", rules=TRAIN)
    mixer, ffn = GPT_OSS[name]

    def changed(layer: LayerConfig) -> LayerConfig:
        attention = dataclasses.replace(layer.mixer, **mixer)
        return dataclasses.replace(
            layer, mixer=attention, ffn=dataclasses.replace(layer.ffn, **ffn)
        )

    other = restrict(model, dataclasses.replace(cfg, layers=tuple(map(changed, cfg.layers))))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = packed_logits(other, tokens, jnp.ones_like(tokens), positions)
    assert np.abs(np.asarray(logits) - expected).max() > 0.05
