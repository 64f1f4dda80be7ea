"""Adapters of towers: choice by regular expression, start, and export of the merged weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import LoRAConfig
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.lora import adapters, with_new_parts
from jaxrl.models.vision.adapters import linear_layers
from jaxrl.models.vision.files import load_tower, tower_tensors
from jaxrl.models.vision.patches import pack_patches
from jaxrl.models.vision.tower import tower_specs
from jaxrl.models.vision.towers import folder_tower, with_trained_tower
from sharding import TRAIN
from tests.models.vision.images import GOLDEN, golden_images


def lora(name: str, *targets: str, freeze: str = "none", **changes):
    """(tower, adapters of a model whose tower is trained)."""
    cfg = folder_tower(GOLDEN / name)
    assert cfg is not None
    decoder = with_trained_tower(model_config(GOLDEN / "qwen3_vl"), cfg, freeze)
    changes = dict(rank=2, target_modules=targets) | changes
    return cfg, adapters(LoRAConfig(**changes), decoder)


def test_linear_layers_have_their_names_in_files_without_numbers():
    cfg = folder_tower(GOLDEN / "qwen3_vl")
    assert cfg is not None
    blocks = {
        "model.visual.blocks.attn.qkv": (48, 16),
        "model.visual.blocks.attn.proj": (16, 16),
        "model.visual.blocks.mlp.linear_fc1": (24, 16),
        "model.visual.blocks.mlp.linear_fc2": (16, 24),
    }
    projector = {
        "model.visual.merger.linear_fc1": (64, 64),
        "model.visual.merger.linear_fc2": (8, 64),
        "model.visual.deepstack_merger_list.linear_fc1": (64, 64),
        "model.visual.deepstack_merger_list.linear_fc2": (8, 64),
    }
    assert linear_layers(cfg) == blocks | projector
    assert linear_layers(dataclasses.replace(cfg, frozen=True)) == projector
    other = folder_tower(GOLDEN / "qwen2_5_vl")
    assert other is not None
    assert "visual.merger.mlp.0" in linear_layers(other)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "o_proj")])
def test_names_of_the_language_model_choose_no_layer_of_the_tower(targets):
    for name in ("qwen3_vl", "gemma3"):
        with pytest.raises(ValueError, match="chooses none of its layers: add some of"):
            lora(name, *targets)


def test_both_parts_have_adapters_by_their_names():
    _, chosen = lora("qwen3_vl", "q_proj", r"visual\.merger\..*", freeze="tower")
    assert chosen is not None
    merger = "model.visual.merger.linear_fc"
    assert chosen.targets == ("q_proj", f"{merger}1", f"{merger}2")
    with pytest.raises(ValueError, match="matches no linear layer of this model"):
        lora("qwen3_vl", "q_proj", r"visual\.blocks\..*", freeze="tower")


def test_layers_within_layers_have_two_names():
    cfg, chosen = lora("gemma4", r"vision_tower\..*\.mlp\..*", "embed_vision.*")
    assert chosen is not None
    assert len(chosen.targets) == 4
    with_lora = dataclasses.replace(cfg, lora=chosen)
    block = with_lora.options("model.vision_tower.encoder.layers.").lora
    assert block is not None
    assert set(block.targets) == {"gate_proj.linear", "up_proj.linear", "down_proj.linear"}


def test_the_projector_alone_is_chosen_by_its_name():
    cfg, chosen = lora("qwen3_vl", r"visual\.merger\..*")
    assert chosen is not None
    assert chosen.targets == ("model.visual.merger.linear_fc1", "model.visual.merger.linear_fc2")
    with_lora = dataclasses.replace(cfg, lora=chosen)
    assert with_lora.options("model.visual.blocks.").lora is None
    merger = with_lora.options("model.visual.merger.").lora
    assert merger is not None
    assert merger.targets == ("linear_fc1", "linear_fc2")


def test_excluded_layers_have_none_and_ranks_are_checked():
    _, chosen = lora("gemma3", ".*vision_tower.*", exclude_modules=(r".*vision.*\.mlp\..*",))
    assert chosen is not None
    assert {name.rpartition(".")[2] for name in chosen.targets} == {
        *("q_proj", "k_proj", "v_proj", "out_proj")
    }
    with pytest.raises(ValueError, match="rank=17 is above the rank of"):
        lora("gemma3", ".*vision_tower.*", rank=17)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, dict(dora=True)], ids=str)
def test_new_adapters_change_nothing_and_an_export_has_them(options, one_device):
    """The merged weights of an export give the features of the tower with adapters."""
    cfg, base = load_tower(GOLDEN / "qwen3_5", rules=TRAIN)
    _, chosen = lora("qwen3_5", r"visual\..*", **options)
    assert chosen is not None
    specs = tower_specs(dataclasses.replace(cfg, lora=chosen))
    tower = with_new_parts(base, specs, chosen, seed=0, rules=TRAIN, dtype=jnp.float32)
    images, *_ = golden_images("qwen3_5")
    rows = jax.tree.map(jnp.asarray, pack_patches(cfg, [images[:1]], 24))
    run = jax.jit(lambda tower: tower(rows, rules=TRAIN)[0])
    before = run(base)
    np.testing.assert_allclose(run(tower), before, atol=1e-5)
    rng = np.random.default_rng(0)

    def trained(path, leaf):
        noise = rng.normal(size=leaf.shape).astype(np.float32)
        return leaf + 0.3 * noise if any(getattr(k, "name", "") == "lora" for k in path) else leaf

    tower = jax.tree.map_with_path(trained, tower)
    merged = {t.name: t.read() for t in tower_tensors(tower)}
    plain = {t.name: t.read() for t in tower_tensors(base)}
    assert merged.keys() == plain.keys()
    changed = {name for name in plain if not np.array_equal(plain[name], merged[name])}
    assert len(changed) == 4 * cfg.L + 2
    leaves, tree = jax.tree.flatten(base)
    names = [t.name for t in tower_tensors(base)]
    arrays = [
        jnp.asarray(spec.from_file(merged[name]))
        for spec, name in zip(jax.tree.leaves(tower_specs(cfg)), names, strict=True)
    ]
    assert [a.shape for a in arrays] == [a.shape for a in leaves]
    after = run(tower)
    assert np.abs(after - before).max() > 0.1
    again = run(jax.tree.unflatten(tree, arrays))
    np.testing.assert_allclose(again, after, atol=1e-4, rtol=1e-5)  # values up to 130
