"""config.json of transformers 4 and 5 <-> DecoderConfig (jaxrl/models/files/hf_config.py)."""

import dataclasses
import json
from pathlib import Path

import pytest
import transformers

from jaxrl.models.config import MLPConfig
from jaxrl.models.families.fields import global_rope
from jaxrl.models.families.gemma3 import local_rope
from jaxrl.models.files.hf_config import config_from_hf, config_to_hf
from jaxrl.models.rope_config import Rope
from tests.models.resized import windows

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = sorted(path.name for path in GOLDEN.iterdir())
LLAMA = dict(
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=6,
    num_attention_heads=4,
    vocab_size=256,
    max_position_embeddings=128,
)
LLAMA3_SCALING = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def golden_config(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_export_and_import_keep_every_field(name):
    cfg = config_from_hf(golden_config(name))
    assert config_from_hf(config_to_hf(cfg)) == cfg


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_exported_config_as_the_original(name, tmp_path):
    original = golden_config(name)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config_from_hf(original))))
    ours = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    theirs = transformers.AutoConfig.from_pretrained(GOLDEN / name).to_dict()
    if text := theirs.get("text_config"):  # an export is a text model
        tied = theirs.get("tie_word_embeddings", text.get("tie_word_embeddings"))
        theirs = text | dict(tie_word_embeddings=tied)
    (ours.get("rope_parameters") or {}).pop("type", None)  # the older name, next to rope_type
    if "mscale" in (theirs.get("rope_parameters") or {}):  # an export has the factor that follows
        del theirs["rope_parameters"]["mscale"], ours["rope_parameters"]["attention_factor"]
    # The two activation keys of Gemma hold one value; max_window_layers only makes layer_types.
    free = {"dtype", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path"}
    free |= {"hidden_activation", "max_window_layers", "architectures"}
    if not theirs.get("hidden_size_per_layer_input"):
        free.add("vocab_size_per_layer_input")
    if ours.get("block_auto_adjust_ff_dim") is False:  # intermediate_size is the width of the MLP
        free |= {name for name in theirs if name.startswith(("block_", "intermediate"))}
    for key in theirs.keys() - free:
        assert ours.get(key) == theirs[key], key


def test_old_and_new_rope_fields_are_equivalent():
    expected = Rope(
        theta=5e5,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_len=64,
    )
    old = LLAMA | dict(rope_theta=5e5, rope_scaling=LLAMA3_SCALING)
    new = LLAMA | dict(rope_parameters=LLAMA3_SCALING | dict(rope_theta=5e5))
    assert global_rope(config_from_hf(old)) == global_rope(config_from_hf(new)) == expected
    oldest = LLAMA | dict(rope_scaling=dict(type="linear", factor=2))
    assert global_rope(config_from_hf(oldest)) == Rope(kind="linear", factor=2.0)


def test_absent_keys_get_the_defaults_of_transformers():
    cfg = config_from_hf(LLAMA)
    mixer = cfg.layers[0].mixer
    assert (mixer.K, mixer.H, cfg.tied, mixer.rope.theta, mixer.window) == (4, 16, False, 1e4, 0)


def test_gemma3_of_an_old_file_gets_its_pattern_and_two_rotary_bases():
    config = dict(
        model_type="gemma3_text",
        num_hidden_layers=7,
        sliding_window=512,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    )
    cfg = config_from_hf(config)
    assert windows(cfg) == (512, 512, 0, 512, 512, 0, 512)
    assert global_rope(cfg) == Rope(theta=1e6, kind="linear", factor=8.0)
    assert local_rope(cfg) == Rope(theta=1e4)
    mixer = cfg.layers[0].mixer
    assert (cfg.V, mixer.H, mixer.score_scale) == (262_208, 256, 1 / 16)  # 256 ** -0.5


def test_gemma3_with_images_gives_its_text_model():
    text = dict(hidden_size=2560, num_hidden_layers=34, sliding_window=1024)
    cfg = config_from_hf(dict(model_type="gemma3", text_config=text, vision_config={}))
    assert (cfg.family, cfg.D, cfg.L, cfg.window(0), cfg.window(5)) == ("gemma3", 2560, 34, 1024, 0)


def test_qwen_windows_are_used_only_if_enabled():
    window = dict(sliding_window=32, max_window_layers=4)
    qwen = LLAMA | dict(model_type="qwen2", num_key_value_heads=2) | window
    assert windows(config_from_hf(qwen)) == (0,) * 6
    assert windows(config_from_hf(qwen | dict(use_sliding_window=True))) == (0, 0, 0, 0, 32, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model_type="gpt2"), r"'gpt2' is not known; known: .*gemma2, .*qwen3"),
        (dict(rope_scaling=dict(rope_type="longrope")), r"'longrope' is not supported.*llama3"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=0.0)), r"factor is 0.0, expected a num"),
        (dict(hidden_act="tanh"), r"hidden_act is 'tanh', which is not known"),
        (dict(quantization_config=dict(bits=4)), r"quantized"),
        (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)), r"partial_"),
    ],
)
def test_errors_name_the_unsupported_setting(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(LLAMA | change)


def test_qwen_may_have_dense_layers_among_those_with_experts():
    config = golden_config("qwen3_moe") | dict(num_hidden_layers=4)
    dense = {}  # by their numbers
    for change in (dict(mlp_only_layers=[1, 2]), dict(decoder_sparse_step=2)):
        cfg = config_from_hf(config | change)
        dense[str(change)] = [i for i, layer in enumerate(cfg.layers) if layer.ffn == MLPConfig(48)]
        assert config_from_hf(config_to_hf(cfg)) == cfg
        assert len(cfg.expert_layers) == 2
    assert list(dense.values()) == [[1, 2], [0, 2]]


def test_a_missing_key_is_named():
    config = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    with pytest.raises(ValueError, match="llama model lacks 'vocab_size'"):
        config_from_hf(config)


def test_the_layer_layout_is_not_part_of_the_file():
    cfg = config_from_hf(LLAMA)
    assert config_to_hf(cfg) == config_to_hf(dataclasses.replace(cfg, stacked=True))


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": "6"},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 0},
        {"num_attention_heads": 128},  # more than features
        {"num_key_value_heads": 3},
        {"hidden_size": None},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": [1]},
        {"rope_scaling": "linear"},
        {"rope_parameters": {"rope_type": "linear", "factor": None}},
        {"tie_word_embeddings": "yes"},
        {"layer_types": ["full_attention", 3]},
        {"text_config": [1]},
    ],
    ids=str,
)
def test_entries_of_another_type_or_size_are_errors(change):
    with pytest.raises(ValueError, match=r"use the model's own config\.json"):
        config_from_hf(LLAMA | change)


def test_null_rope_parameters_of_a_layer_type_mean_the_default():
    config = golden_config("gemma3")
    config["rope_parameters"] = {"full_attention": None}
    assert global_rope(config_from_hf(config)) == Rope(theta=1_000_000.0)


def test_published_files_of_qwen2_5_vl_have_the_text_part_at_the_top_level():
    published = LLAMA | dict(
        model_type="qwen2_5_vl",
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        num_key_value_heads=2,
        rope_theta=1e6,
        rope_scaling=dict(type="mrope", mrope_section=[2, 3, 3]),
        tie_word_embeddings=True,
        use_sliding_window=False,
        vision_config=dict(depth=2),
        vision_token_id=9,
    )
    cfg = config_from_hf(published)
    rope = Rope(theta=1e6, mrope_section=(2, 3, 3), mrope_chunked=True)
    assert cfg.family == "qwen2_5_vl" and cfg.tied and cfg.attention_layers[0].rope == rope
    assert config_from_hf(config_to_hf(cfg)) == cfg


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (dict(mrope_section=[3, 3, 2], mrope_interleaved=False), "mrope_interleaved is False"),
        (dict(mrope_section=[3, 3]), r"mrope_section is \[3, 3\]; write three numbers"),
    ],
)
def test_sections_that_transformers_reads_in_another_way_are_refused(entries, message):
    config = LLAMA | dict(
        model_type="qwen3_vl_text", rope_parameters=dict(rope_theta=1e4) | entries
    )
    with pytest.raises(ValueError, match=message):
        config_from_hf(config)


@pytest.mark.parametrize("layers", [{}, {"2": {}, "5": {}}])
def test_layers_of_gemma4_without_sizes_have_those_of_the_others(layers, tmp_path):
    """As transformers reads it: `per_layer_config` replaces both entries of global layers."""
    config = golden_config("gemma4") | dict(per_layer_config=layers, global_head_dim=64)
    assert {(mixer.K, mixer.H) for mixer in config_from_hf(config).attention_layers} == {(2, 16)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.per_layer_config[2].head_dim == 16
    exported = config_to_hf(config_from_hf(config))
    assert config_from_hf(exported) == config_from_hf(config)


@pytest.mark.parametrize(
    "layers",
    [
        {"2": {"head_dim": 8}},  # not in layer 5
        {"0": {"head_dim": 8}},  # a layer with a window
        {"2": {"sliding_window": 8}, "5": {"sliding_window": 8}},
        {"x": {}},
        {"2": 5, "5": 5},
        [],
    ],
    ids=str,
)
def test_other_sizes_of_single_layers_of_gemma4_are_refused(layers):
    with pytest.raises(ValueError, match="per_layer_config is"):
        config_from_hf(golden_config("gemma4") | dict(per_layer_config=layers))
