"""Learning rate factors and weight decay by tensor name and layer."""

# Unions in the types of optax and jax, without the fields that are read here.
# pyright: reportAttributeAccessIssue=false

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import LearnerConfig
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.optimizers.patterns import found_patterns, lr_factors, weight_decays
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import hf_names, is_spec
from jaxrl.models.vision.tower import tower_specs
from jaxrl.models.vision.towers import known_tower
from tests.learner.tiny_policy import MODEL
from tests.models.resized import resized
from tests.models.vision.images import GOLDEN, TOWERS

MODELS = [resized(MODEL, L=3, stacked=stacked) for stacked in (False, True)]


def by_name(numbers, model) -> dict[str, float]:
    """Number of each tensor in the file."""
    specs = jax.tree.leaves(decoder_specs(model), is_leaf=is_spec)
    found = {}
    for spec, number in zip(specs, jax.tree.leaves(numbers), strict=True):
        names = hf_names(spec)
        found |= dict(zip(names, np.broadcast_to(np.ravel(number), len(names)), strict=True))
    return found


@pytest.mark.parametrize("model", MODELS, ids=["list", "stacked"])
def test_the_first_pattern_that_is_found_gives_the_number(model):
    cfg = LearnerConfig(
        lr_factors=(r"layers\.1\..*proj=0.5", r"layers\.[01]\.=0", "embed=0.25"),
        weight_decay=0.1,
        weight_decays=("layernorm=0.3", r"layers\.2\.mlp=0"),
    )
    factor = by_name(lr_factors(cfg, decoder_specs(model)), model)
    decay = by_name(weight_decays(cfg, decoder_specs(model)), model)
    layer = "model.layers.{}.".format
    assert factor[layer(1) + "mlp.up_proj.weight"] == 0.5
    assert factor[layer(1) + "input_layernorm.weight"] == 0
    assert factor[layer(0) + "mlp.up_proj.weight"] == 0
    assert factor[layer(2) + "mlp.up_proj.weight"] == factor["model.norm.weight"] == 1
    assert factor["model.embed_tokens.weight"] == 0.25
    near = np.float32(0.3)
    assert decay[layer(0) + "input_layernorm.weight"] == pytest.approx(near)
    assert decay[layer(2) + "mlp.up_proj.weight"] == 0
    assert decay[layer(1) + "mlp.up_proj.weight"] == pytest.approx(0.1)
    assert decay[layer(1) + "self_attn.q_proj.bias"] == 0


@pytest.mark.parametrize("name", TOWERS)
def test_of_a_tower_the_matrices_decay(name):
    """Also the embedding of patches and the table of positions, which have more axes in files."""
    specs = tower_specs(known_tower(GOLDEN / name))
    numbers = jax.tree.leaves(weight_decays(LearnerConfig(weight_decay=0.1), specs))
    found: dict[float, set[str]] = {0.0: set(), 0.1: set()}
    for spec, number in zip(jax.tree.leaves(specs, is_leaf=is_spec), numbers, strict=True):
        found[number].add(re.sub(r"\.\d+\.", ".", spec.hf))
    others = re.compile(r"norm[^.]*\.weight$|\.ln_q\.|\.std_scale$|(in|out)put_(min|max)$")
    every = found[0.0] | found[0.1]
    assert {one for one in found[0.0] if not one.endswith("bias")} == set(
        filter(others.search, every)
    )
    assert any("patch_embed" in one for one in found[0.1])


@pytest.mark.parametrize("model", MODELS, ids=["list", "stacked"])
def test_the_layer_decay_falls_from_the_last_layer_to_the_embedding(model):
    cfg = LearnerConfig(lr_layer_decay=0.5)
    factor = by_name(lr_factors(cfg, decoder_specs(model)), model)
    rates = [factor[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(3)]
    assert rates == [0.125, 0.25, 0.5]
    assert factor["model.norm.weight"] == 1 and factor["model.embed_tokens.weight"] == 1 / 16


def test_no_pattern_leaves_the_program_as_it_is():
    assert lr_factors(LearnerConfig(), decoder_specs(MODEL)) is None


def test_a_factor_scales_the_whole_step_of_its_layer():
    model = MODELS[1]
    specs = decoder_specs(model)
    params = jax.tree.map(lambda s: jnp.ones(s.shape), specs, is_leaf=is_spec)
    steps = []
    for factors in ((), (r"layers\.1\.=0.5",)):
        cfg = LearnerConfig(optimizer="sgd", lr=0.1, weight_decay=0.5, lr_factors=factors)
        transform = make_optimizer(cfg, 10, specs).transform
        steps.append(transform.update(params, transform.init(params), params)[0].layers.mlp.up.w)
    # -0.1 (1 + 0.5 * 1), and half of it in layer 1
    np.testing.assert_allclose(steps[0], -0.15, rtol=1e-6)
    np.testing.assert_allclose(steps[1][:, 0, 0], [-0.15, -0.075, -0.15], rtol=1e-6)


def test_a_pattern_that_is_found_nowhere_is_an_error_with_near_names():
    cfg = LearnerConfig(lr_factors=("mlp.upproj=0.1",))
    with pytest.raises(ValueError, match=r"lr_factors has 'mlp.upproj'.*layers\.0\.mlp\.up_proj"):
        make_optimizer(cfg, 10, decoder_specs(MODEL))
    cfg = LearnerConfig(weight_decays=("zzz=0.1",))
    with pytest.raises(ValueError, match=r"weight_decays has 'zzz'.*model\.embed_tokens\.weight"):
        make_optimizer(cfg, 10, decoder_specs(MODEL))


def test_a_critic_takes_those_patterns_that_its_names_have():
    untied = dataclasses.replace(MODEL, tied=False, heads=("score",))
    cfg = LearnerConfig(lr_factors=("lm_head=0.1", "norm=0.5"), weight_decays=("lm_head=0",))
    found = found_patterns(cfg, decoder_specs(untied))
    assert (found.lr_factors, found.weight_decays) == (("norm=0.5",), ())
