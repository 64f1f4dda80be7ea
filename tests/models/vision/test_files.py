"""Towers of Hugging Face folders: config.json and tensors, both ways."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxrl.models.files.quantized.tensors import read_tensor
from jaxrl.models.files.safetensors import read_header, write_tensors
from jaxrl.models.files.weight_files import all_tensors
from jaxrl.models.spec import hf_names, is_spec
from jaxrl.models.vision.files import common_name, is_of_tower, load_tower, tower_tensors
from jaxrl.models.vision.tower import tower_specs
from jaxrl.models.vision.towers import TOWERS as KNOWN
from jaxrl.models.vision.towers import folder_tower, tower_from_hf, tower_to_hf
from sharding import TRAIN
from tests.marks import graded
from tests.models.vision.images import GOLDEN, TOWERS


def config(name: str, **changes) -> dict:
    found = json.loads((GOLDEN / name / "config.json").read_text())
    return found | dict(vision_config=found["vision_config"] | changes)


@pytest.mark.parametrize("name", TOWERS)
def test_config_round_trip(name):
    cfg = tower_from_hf(config(name))
    again = config(name) | tower_to_hf(cfg)
    assert tower_from_hf(again) == cfg
    written = again["vision_config"]
    assert {k: v for k, v in config(name)["vision_config"].items() if written.get(k, v) != v} == {}


@pytest.mark.parametrize("name", graded(TOWERS, default=["gemma4", "qwen3_vl"]))
def test_tensors_round_trip_bit_for_bit(name, one_device):
    _, tower = load_tower(GOLDEN / name, rules=TRAIN)
    files = dict(all_tensors(GOLDEN / name))
    before = {common_name(n): info for n, info in files.items() if is_of_tower(common_name(n))}
    after = {common_name(t.name): t for t in tower_tensors(tower)}
    assert before.keys() == after.keys()
    header = read_header(GOLDEN / name / "model.safetensors")
    assert {t.name for t in after.values()} <= header.keys()
    for part, tensor in after.items():
        values = tensor.read()
        assert values.shape == before[part].shape == tensor.shape
        raw = read_tensor(before[part])
        np.testing.assert_array_equal(values, raw)


def test_both_forms_of_names_are_read(one_device, tmp_path):
    """Published files of Gemma 3 have vision_tower.vision_model, newer ones model.vision_tower."""
    _, tower = load_tower(GOLDEN / "gemma3", rules=TRAIN)
    prefixes = ("vision_tower.vision_model.", "model.vision_tower.")
    for i, prefix in enumerate(prefixes):
        folder = tmp_path / str(i)
        folder.mkdir()
        shutil.copy(GOLDEN / "gemma3" / "config.json", folder)
        tensors = {t.name.replace("vision_tower.", prefix): t for t in tower_tensors(tower)}
        tensors["vision_tower.head.probe"] = next(iter(tensors.values()))  # not read by the model
        layout = {name: (t.dtype, t.shape) for name, t in tensors.items()}
        write_tensors(
            folder / "model.safetensors", layout, (tensors[name].read() for name in layout)
        )
        _, again = load_tower(folder, rules=TRAIN)
        jax.tree.map(np.testing.assert_array_equal, again, tower)


def test_missing_and_misshaped_tensors_are_listed(one_device, tmp_path):
    shutil.copytree(GOLDEN / "qwen3_5", tmp_path / "model")
    changed = config("qwen3_5", depth=4, intermediate_size=20)
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"(?s)12 missing: model.visual.blocks.3.*another shape"):
        load_tower(tmp_path / "model", rules=TRAIN)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config("qwen3_5", depth=2)))
    with pytest.raises(ValueError, match=r"12 unexpected: visual\.blocks\.2"):
        load_tower(tmp_path / "model", rules=TRAIN)


def test_a_text_model_has_no_tower(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert folder_tower(tmp_path) is None
    with pytest.raises(ValueError, match="no vision tower of a known kind; model types"):
        load_tower(tmp_path, rules=TRAIN)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_vl", dict(window_size=8), "window_size is 8, which is not known"),
        ("qwen3_vl", dict(hidden_act="tanh"), "hidden_act is 'tanh'"),
        ("qwen3_vl", dict(num_position_embeddings=24), "24, which is not a square"),
        ("qwen3_vl", dict(deepstack_visual_indexes=[1, 3]), "deepstack reads the blocks"),
        ("qwen3_vl", dict(deepstack_visual_indexes=[1, 1]), "deepstack reads the blocks"),
        ("qwen3_vl", dict(rope_parameters=dict(rope_type="yarn")), "the type 'yarn'"),
        ("qwen3_vl", dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary"),
        ("qwen3_vl", dict(num_heads=3), "16 features do not divide over 3 heads"),
        ("qwen3_vl", dict(num_heads=8), "heads of 2 features have no equal pairs"),
        ("qwen3_vl", dict(patch_size=[2, 2]), r"patch_size is \[2, 2\], expected an integer"),
        ("qwen3_vl", dict(rope_parameters=3), "rope_parameters is 3, expected an object"),
        ("qwen3_vl", dict(deepstack_visual_indexes=2), "is 2, expected a list of integers"),
        ("qwen3_vl", dict(depth=10**6), "1000000 blocks are more than 1000"),
        ("qwen3_vl", dict(depth=-1), "depth is -1, expected an integer from 1"),
        ("qwen3_vl", dict(model_type="siglip_vision_model"), "'siglip_vision_model'"),
        ("qwen3_5", dict(deepstack_visual_indexes=[1]), "transformers ignores in qwen3_5"),
        ("qwen2_5_vl", dict(window_size=9), "no multiple of the 4 of a token"),
        ("qwen2_5_vl", dict(in_chans=1), "in_chans is 1, and for qwen2_5_vl"),
        ("gemma3", dict(image_size=13), "no square of tokens"),
        ("gemma4", dict(use_clipped_linears="yes"), "use_clipped_linears is 'yes', expected true"),
        ("gemma4", dict(num_key_value_heads=1), "only that of 2 query heads"),
        ("gemma4", dict(attention_bias=True), "attention_bias is True"),
        ("gemma4", dict(head_dim=6), "heads of 6 features have no equal pairs"),
        ("gemma3", dict(attention_dropout=0.1), "attention_dropout is 0.1"),
    ],
)
def test_entries_that_are_not_understood_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        tower_from_hf(config(name, **changes))


def test_published_entries_of_gemma4_without_effect_are_read():
    changes = dict(global_head_dim=72, default_output_length=280, rope_parameters=None)
    cfg = tower_from_hf(config("gemma4", **changes))
    assert cfg.attn.theta == 100
    assert tower_from_hf(config("gemma4")).attn.theta == 50


def test_the_published_tower_of_gemma4_e2b_is_read():
    """Every entry of its vision_config, with those that transformers writes for all models."""
    sizes = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=16, head_dim=64)
    heads = dict(num_attention_heads=12, num_key_value_heads=12, global_head_dim=64)
    patches = dict(patch_size=16, pooling_kernel_size=3, position_embedding_size=10240)
    switches = dict(use_clipped_linears=True, standardize=False, attention_bias=False)
    neutral = dict(
        attention_dropout=0.0,
        default_output_length=280,
        dtype="bfloat16",
        hidden_activation="gelu_pytorch_tanh",
        id2label={"0": "LABEL_0", "1": "LABEL_1"},
        initializer_range=0.02,
        is_encoder_decoder=False,
        label2id={"LABEL_0": 0, "LABEL_1": 1},
        max_position_embeddings=131072,
        output_attentions=False,
        problem_type=None,
        return_dict=True,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_theta=100.0, rope_type="default"),
    )
    vision = dict(model_type="gemma4_vision") | sizes | heads | patches | switches | neutral
    text = dict(hidden_size=1536)
    cfg = tower_from_hf(config("gemma4_limits") | dict(vision_config=vision, text_config=text))
    assert (cfg.L, cfg.out_D, cfg.attn.theta) == (16, 1536, 100)
    assert cfg.attn.clipped and cfg.ffn.clipped
    names = {n for s in jax.tree.leaves(tower_specs(cfg), is_leaf=is_spec) for n in hf_names(s)}
    limits = {name for name in names if name.endswith(("put_min", "put_max"))}
    assert len(limits) == 16 * 7 * 4
    assert "model.vision_tower.encoder.layers.15.mlp.down_proj.output_max" in limits


def test_an_unknown_tower_is_refused_with_the_known_ones():
    assert set(KNOWN) >= {"qwen3_vl", "qwen3_5", "qwen3_5_moe", "qwen2_5_vl", "gemma3"}
    with pytest.raises(ValueError, match="'mistral3' is not known; known: qwen3_vl"):
        tower_from_hf(dict(model_type="mistral3", vision_config={}))
