"""Configs of foreign models: as transformers reads them, or refused with the field.

Tests of jaxrl/models/families/ and jaxrl/models/files/hf_config.py. The drawn configs and their
logits are those of scripts/make_golden_configs.py.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file
from transformers.generation.configuration_utils import GenerationConfig

from jaxrl.config.keys import RolloutConfig
from jaxrl.engine.engine import PagedEngine
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.families import entries
from jaxrl.models.families.fields import global_rope
from jaxrl.models.families.gemma3 import local_rope
from jaxrl.models.files.export_form import export_form
from jaxrl.models.files.hf_config import (
    FAMILIES,
    IMAGE_AND_TEXT,
    config_from_hf,
    config_to_hf,
)
from jaxrl.models.files.hf_load import load_model
from jaxrl.models.files.hf_save import in_file_order
from jaxrl.models.files.safetensors import Tensor
from jaxrl.models.files.tensor_shapes import expected_shapes
from jaxrl.models.packed import forward_packed
from jaxrl.models.rope_config import Rope
from scripts.pages import model_fields
from scripts.seeded_weights import seeded_tensor, seeded_tokens
from sharding import TRAIN
from tests.marks import graded
from tests.models.resized import windows

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "models" / "golden_configs"
CASES = {case["name"]: case for case in json.loads((GOLDEN / "configs.json").read_text())}
LENGTH, SHOWN = 24, [6, 14, 23]
IMAGE_MODELS = ("qwen3_vl", "qwen2_5_vl")
FAMILY_TYPES = {name: name for name in FAMILIES}
FAMILY_TYPES |= {
    name: f"{name}_text"
    for name in (
        *("gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe", "muse_glimmer"),
        *IMAGE_MODELS,
    )
}
# transformers has no text-only class of muse_glimmer and Qwen-VL, and none is drawn of gemma4.
UNDRAWN = ("muse_glimmer_text", "gemma4_text", "gemma4_unified_text")
UNDRAWN += tuple(f"{name}_text" for name in IMAGE_MODELS)
DRAWN_TYPES = [kind for kind in FAMILY_TYPES.values() if kind not in UNDRAWN]
SIZES = dict(
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=48,
    max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
MIXED = ["full_attention", "sliding_attention", "full_attention"]
EXTRA: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_5_text": dict(full_attention_interval=3),
    "glm4_moe_lite": dict(num_key_value_heads=4, head_dim=64),
    "deepseek_v3": dict(num_key_value_heads=4, head_dim=64, first_k_dense_replace=1),
    "qwen3_5_moe_text": dict(full_attention_interval=3),
    "qwen3_next": dict(full_attention_interval=3),
    "glm4_moe": dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=20),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
}


def config(model_type: str, **more: Any) -> dict[str, Any]:
    return dict(model_type=model_type) | SIZES | EXTRA.get(model_type, {}) | more


def read(model_type: str, **more: Any) -> DecoderConfig:
    return config_from_hf(config(model_type, **more))


def through_transformers(json_config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config as transformers reads it and saves it again."""
    (folder / "config.json").write_text(json.dumps(json_config))
    found = transformers.AutoConfig.from_pretrained(folder)
    found.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    # The type that transformers gives to a mistral config with layer_types.
    return saved | ({"model_type": "mistral"} if saved["model_type"] == "ministral" else {})


@pytest.fixture(scope="module")
def golden_logits() -> Any:
    return np.load(GOLDEN / "logits.npz")


@jax.jit
def packed_logits(model: Decoder, tokens: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = forward_packed(model, tokens, jnp.ones_like(tokens), positions, rules=TRAIN)
    return model.logits(hidden, TRAIN)


def refusal(case: dict[str, Any]) -> str:
    """The error of a config; "" if it is read."""
    try:
        config_from_hf(case["config"])
    except ValueError as error:
        return str(error)
    return ""


SUPPORTED = [name for name, case in CASES.items() if not refusal(case)]
# Families with other rotary entries, norms or factors than the rest.
SPECIAL = ("lfm2", "phi3", "ministral3", "cohere2", "olmo3", "glm4", "starcoder2", "granite")
SPECIAL += ("deepseek_v3", "glm4_moe_lite")
LIKE_OTHERS = ("olmo2", "smollm3", "gemma", "seed_oss", "qwen2_moe", "exaone4")
THOROUGH = [
    name
    for name in SUPPORTED
    if CASES[name]["config"]["model_type"] not in (*SPECIAL, *LIKE_OTHERS)
    or name.endswith(("_0", "_3"))
]


@pytest.mark.parametrize("model_type", DRAWN_TYPES)
def test_every_config_is_read_or_refused_with_the_field(model_type, golden_logits):
    drawn = {
        name: case for name, case in CASES.items() if case["config"]["model_type"] == model_type
    }
    assert len(drawn) > 8
    for name, case in drawn.items():
        if message := refusal(case):
            assert any(field in message for field in case["may_refuse"]), (case, message)
        else:
            assert name in golden_logits, f"transformers itself refuses {case}"


@pytest.mark.parametrize(
    "name",
    graded(SUPPORTED, default=["llama_3", "qwen3_moe_14", "gemma3_text_4"], thorough=THOROUGH),
)
def test_the_logits_of_a_config_are_those_of_transformers(
    name, golden_logits, tmp_path, one_device
):
    seed, json_config = CASES[name]["seed"], CASES[name]["config"]
    cfg = config_from_hf(json_config)
    shapes = expected_shapes(decoder_specs(cfg)).items()
    stored = [
        Tensor(key, np.dtype(np.float32), shape, lambda: np.zeros(0)) for key, shape in shapes
    ]
    stored = in_file_order(stored, export_form(cfg, None))
    tensors = {tensor.name: seeded_tensor(seed, tensor.name, tensor.shape) for tensor in stored}
    (tmp_path / "config.json").write_text(json.dumps(json_config))
    save_file(tensors, tmp_path / "model.safetensors")
    _, model = load_model(tmp_path, rules=TRAIN, stacked=True)
    tokens = seeded_tokens(seed, LENGTH, json_config["vocab_size"])
    found = np.asarray(packed_logits(model, tokens))[0, SHOWN]
    np.testing.assert_allclose(found, golden_logits[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "model_type",
    graded(
        DRAWN_TYPES,
        default=[kind for kind in DRAWN_TYPES if kind not in (*SPECIAL, *LIKE_OTHERS)],
    ),
)
def test_transformers_reads_a_config_and_its_export_with_the_same_meaning(model_type, tmp_path):
    """The config that transformers saves, and that of its export, are read as the config itself."""
    for name in SUPPORTED:
        original = CASES[name]["config"]
        if original["model_type"] != model_type:
            continue
        cfg = config_from_hf(original)
        assert config_from_hf(through_transformers(original, tmp_path)) == cfg, name
        exported = config_to_hf(cfg)
        assert config_from_hf(exported) == cfg, name
        assert config_from_hf(through_transformers(exported, tmp_path)) == cfg, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_is_in_the_tables(family):
    """A field that is new in transformers fails here until a table names it."""
    known = FAMILIES[family].ENTRIES
    in_tables = known.read | known.neutral | known.neutral_at.keys()
    in_tables |= entries.WITHOUT_EFFECT | entries.NEUTRAL_AT.keys()
    model_type = FAMILY_TYPES[family]
    found = transformers.CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(found)}
    assert not fields - in_tables
    assert not set(GenerationConfig._get_default_generation_params()) - in_tables


@pytest.mark.parametrize("family", IMAGE_AND_TEXT)
def test_every_field_of_an_image_and_text_model_is_in_the_tables(family):
    fields = {field.name for field in dataclasses.fields(transformers.CONFIG_MAPPING[family])}
    table = IMAGE_AND_TEXT[family].IMAGE_ENTRIES
    known = table.read | table.neutral | entries.NEUTRAL_AT.keys()
    assert not fields - known - entries.WITHOUT_EFFECT


def test_the_page_of_the_tables_is_up_to_date():
    page = (ROOT / "docs" / "reference" / "model_fields.md").read_text()
    assert page == model_fields.markdown(), (
        "run: python -m scripts.pages.model_fields > docs/reference/model_fields.md"
    )


# F3 of the table of cases: fields that were misread.


def test_f3_windows_of_qwen3_moe_are_on_every_layer():
    """transformers has no max_window_layers in this family."""
    window = dict(use_sliding_window=True, sliding_window=5)
    assert windows(read("qwen3_moe", **window)) == (5, 5, 5)
    assert windows(read("qwen3_moe", **window, max_window_layers=2)) == (5, 5, 5)
    assert windows(read("qwen3_moe", use_sliding_window=True)) == (4096,) * 3
    assert windows(read("qwen3_moe", sliding_window=5)) == (0, 0, 0)


def test_f3_softcaps_of_gemma3_are_refused_where_transformers_ignores_them():
    with pytest.raises(ValueError, match=r"attn_logit_softcapping is 50.0.*ignores"):
        read("gemma3_text", attn_logit_softcapping=50.0)
    assert read("gemma3_text", final_logit_softcapping=30.0).logit_softcap == 30.0
    assert read("gemma2").layers[0].mixer.softcap == 50.0  # the default of transformers


def test_f3_rope_scaling_replaces_rope_parameters():
    new = dict(rope_type="default", rope_theta=5e5)
    for model_type in ("llama", "qwen2", "mixtral"):
        cfg = read(model_type, rope_parameters=new, rope_scaling=YARN | dict(rope_theta=5e5))
        rope = global_rope(cfg)
        assert (rope.kind, rope.theta, rope.factor, rope.original_len) == ("yarn", 5e5, 4.0, 16)
    same = global_rope(read("llama", rope_parameters=new, rope_theta=5e5, rope_scaling=YARN))
    assert (same.kind, same.theta) == ("yarn", 5e5)
    assert global_rope(read("llama", rope_parameters=new, rope_scaling={})) == Rope(theta=5e5)
    assert global_rope(read("llama", rope_parameters=new, rope_scaling=None)) == Rope(theta=5e5)


@pytest.mark.parametrize("top", [{}, dict(rope_theta=300.0)], ids=["absent", "other"])
def test_f3_rope_scaling_that_would_change_the_base_is_refused(top):
    """transformers takes the default base, 10,000, instead of that of rope_parameters."""
    new = dict(rope_type="default", rope_theta=5e5)
    with pytest.raises(ValueError, match=r"rope_scaling replaces .*rope_theta=500000.*write"):
        read("llama", rope_parameters=new, rope_scaling=YARN, **top)


def test_f3_the_original_length_at_the_top_level_comes_first():
    for scaling in ("rope_scaling", "rope_parameters"):
        entry = {scaling: YARN}
        cfg = read("llama", **entry, original_max_position_embeddings=32)
        assert global_rope(cfg).original_len == 32
    with pytest.raises(ValueError, match="original_max_position_embeddings is 32"):
        read("gemma3_text", rope_scaling=YARN, original_max_position_embeddings=32)


def test_f3_sequences_beyond_the_length_of_a_dynamic_scaling_are_refused():
    cfg = read("llama", rope_scaling=dict(rope_type="dynamic", factor=4.0))
    assert cfg.context_len == 64
    with pytest.raises(ValueError, match="65 tokens, the model supports 64"):
        PagedEngine(cfg, RolloutConfig(), rules=TRAIN, dtype=jnp.float32, max_len=65)


# Relatives of F3.


@pytest.mark.parametrize("model_type", FAMILY_TYPES.values())
def test_an_unknown_field_is_refused_unless_it_is_off(model_type):
    for value in (True, 0.5, "x", [1], {"a": 1}):
        with pytest.raises(ValueError, match=rf"residual_scale is .*{model_type} models.*remove"):
            read(model_type, residual_scale=value)
    for value in (None, False, 0, [], {}):
        read(model_type, residual_scale=value)


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("llama", dict(quantization_config=dict(quant_method="awq")), "quantized .*'awq'"),
        ("qwen3", dict(compression_config=dict(quant_method="fp8")), "compression_config.*'fp8'"),
        (
            "qwen2",
            dict(auto_map=dict(AutoModelForCausalLM="modeling_x.X")),
            "auto_map .*modeling_x",
        ),
        ("qwen2", dict(is_causal=False), "is_causal is False.*only True"),
        ("llama", dict(architectures=["LlamaForTokenClassification"]), "architectures is .*Token"),
        ("llama", dict(architectures=["Qwen2ForCausalLM"]), "architectures is .*LlamaForCausalLM"),
        ("qwen2", dict(architectures=["Qwen2ForRewardModel"]), "architectures is .*RewardModel"),
        ("llama", dict(num_nextn_predict_layers=1), "num_nextn_predict_layers is 1"),
        ("llama", dict(attention_dropout=0.1), "attention_dropout is 0.1.*only 0"),
        ("llama", dict(per_layer_config={"0": dict(head_dim=4)}), "per_layer_config"),
        ("llama", dict(text_config=dict(hidden_size=8)), "text_config"),
        ("llama", dict(sliding_window=8), "sliding_window is 8"),
        ("llama", dict(layer_types=MIXED), "layer_types .*contradict"),
        ("llama", dict(rope_scaling=YARN | dict(mrope_section=[1])), "mrope_section"),
        ("llama", dict(rope_parameters=dict(full_attention=YARN)), "rope_parameters by layer type"),
        ("mistral", dict(mlp_bias=True), "mlp_bias is True"),
        ("mistral", dict(sliding_window=None, layer_types=MIXED), "sliding_window is None"),
        ("mixtral", dict(num_experts=8), "num_experts and num_local_experts differ"),
        ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise is 0.1"),
        ("qwen2", dict(layer_types=MIXED, sliding_window=8), "sliding_window is None"),
        ("qwen3", dict(layer_types=["full_attention"]), "layer_types has 1 entries for 3 layers"),
        ("qwen3_moe", dict(shared_expert_intermediate_size=20), "shared_expert_intermediate_size"),
        ("qwen3_moe", dict(mlp_only_layers=[0, 1, 2]), "no layer with experts"),
        ("qwen3_next", dict(decoder_sparse_step=0), "decoder_sparse_step is 0"),
        ("qwen3_5_moe_text", dict(norm_topk_prob=False), "norm_topk_prob is False.*only True"),
        ("qwen3_5_moe_text", dict(mlp_only_layers=[0]), r"mlp_only_layers is \[0\]"),
        ("qwen3_5_moe_text", dict(shared_expert_intermediate_size=0), "width of the shared"),
        ("glm4_moe", dict(scoring_func="softmax"), "scoring_func is 'softmax'"),
        ("glm4_moe", dict(first_k_dense_replace=3), "first_k_dense_replace=3 leaves none of 3"),
        ("glm4_moe", dict(n_group=3), "n_group=3 and topk_group=1 divide no 4 experts"),
        ("glm4_moe", dict(n_group=2, topk_group=3), "n_group=2 and topk_group=3 divide"),
        ("glm4_moe", dict(n_group=4), "groups of one expert"),
        ("glm4_moe", dict(n_group=2, num_experts_per_tok=3), "3 experts per token of 1 groups"),
        ("glm4_moe", dict(n_shared_experts=0), "n_shared_experts is 0"),
        ("gpt_oss", dict(sliding_window=None), "sliding_window is None"),
        ("gpt_oss", dict(hidden_act="gelu"), "hidden_act is 'gelu'.*only silu"),
        ("gpt_oss", dict(swiglu_limit=0), "swiglu_limit is 0"),
        ("gemma2", dict(sliding_window=None), "sliding_window is None"),
        ("gemma2", dict(hidden_activation="tanh"), "hidden_activation is 'tanh'"),
        ("gemma3_text", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        ("gemma3_text", dict(rope_parameters=YARN), "rope_parameters of gemma3 models"),
        ("gemma3_text", dict(rope_scaling=dict(type="linear", factor=8.0)), "write rope_type"),
        ("gemma3_text", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
        ("qwen3_moe", dict(sliding_window=True), "sliding_window is True, expected an integer"),
        ("qwen3", dict(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
        (
            "llama",
            dict(rope_scaling=YARN, rope_parameters=dict(rope_theta=5.0)),
            "rope_scaling replaces rope_parameters with its rope_theta=5",
        ),
        ("gemma4_text", dict(use_bidirectional_attention="all"), "use_bidirectional_attention is"),
        ("gemma4_unified_text", dict(hidden_size_per_layer_input=8), "hidden_size_per_layer_input"),
        ("gemma4_unified_text", dict(enable_moe_block=True), "enable_moe_block is True"),
        ("lfm2", dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
        ("muse_glimmer_text", dict(layer_rope_theta=[5.0, 1e4, 0]), "layer_rope_theta is"),
        ("muse_glimmer_text", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_field_that_changes_the_model_is_refused_by_name(model_type, change, message):
    with pytest.raises(ValueError, match=message):
        read(model_type, **change)


@pytest.mark.parametrize("model_type", ["gemma5", "gemma5_text", "ministral", "llama4", None])
def test_an_unknown_family_is_refused_as_such_and_not_over_a_field(model_type):
    """Whatever its fields contain: here the number of heads of every layer."""
    unknown = dict(model_type=model_type, num_attention_heads=[8, 4], text_config=[1])
    with pytest.raises(ValueError, match=r"model_type .* is not known; known: .*gemma3,"):
        config_from_hf(unknown)


def test_the_nearest_family_of_an_unknown_one_is_named_with_the_fields_that_it_does_not_know():
    found = config("glm5_moe", index_topk=2048, q_lora_rank=None, n_routed_experts=4)
    with pytest.raises(ValueError, match=r"The nearest is glm4_moe; .*not know: index_topk$"):
        config_from_hf(found)
    found = dict(model_type="qwen4_vl", text_config=config("qwen4_vl_text", new_gate="x"))
    with pytest.raises(ValueError, match=r"The nearest is qwen\w+; .*not know: new_gate$"):
        config_from_hf(found)


@pytest.mark.parametrize(
    ("model_type", "nearest", "field"),
    [
        ("lfm2_moe", "lfm2", "num_experts"),
        ("lfm2_vl", "lfm2", "vision_config"),
        ("glm_moe_dsa", "glm4_moe_lite", "index_topk"),
        ("glm4v", r"glm4\w*", "image_token_id"),
        ("glm5_next", r"glm4_moe\w*", "index_topk"),
        ("deepseek_v32", "deepseek_v3", "index_topk"),
        ("deepseek_v4", "deepseek_v3", "hc_mult"),
        ("gemma4_unified_assistant", "gemma4_unified_text", "backbone_hidden_size"),
        ("qwen3_omni_moe", r"qwen\w*", "thinker_config"),
        ("qwen3_vl_moe", "qwen3_moe", "vision_config"),
        ("nemotron_h", r"\w+", "mamba_num_heads"),
    ],
)
def test_models_of_transformers_that_are_not_known_are_refused_with_their_fields(
    model_type, nearest, field
):
    theirs = transformers.CONFIG_MAPPING[model_type]().to_dict()
    with pytest.raises(ValueError, match=rf"The nearest is {nearest}; .*not know: .*\b({field})\b"):
        config_from_hf(theirs)


@pytest.mark.parametrize(
    ("model_type", "nearest"), [("deepseek_v2", "deepseek_v3"), ("minimax_m2", "mixtral")]
)
def test_an_unknown_family_with_the_fields_of_a_known_one_is_not_called_the_same(
    model_type, nearest
):
    theirs = transformers.CONFIG_MAPPING[model_type]().to_dict()
    with pytest.raises(ValueError, match=f"nearest is {nearest}; it has the same fields but may"):
        config_from_hf(theirs)


def test_the_text_part_of_mistral3_has_one_of_two_types():
    text = config("mistral", sliding_window=None, tie_word_embeddings=False)
    model = dict(model_type="mistral3", text_config=text, vision_config={}, spatial_merge_size=2)
    assert config_from_hf(model) == config_from_hf(text | dict(tie_word_embeddings=True))
    assert not config_from_hf(model | dict(tie_word_embeddings=False)).tied
    with pytest.raises(ValueError, match="'llama'; mistral or ministral3 is supported"):
        config_from_hf(model | dict(text_config=config("llama")))


def test_absent_fields_get_the_defaults_of_the_class_in_transformers():
    """Mistral's class has a window unless the file sets it to null."""
    assert windows(read("mistral")) == (4096,) * 3
    assert windows(read("mistral", sliding_window=None)) == (0, 0, 0)
    assert read("mistral", num_attention_heads=8, num_key_value_heads=None).layers[0].mixer.K == 8
    without = {key: value for key, value in config("mistral", num_attention_heads=16).items()}
    del without["num_key_value_heads"]
    assert config_from_hf(without).layers[0].mixer.K == 8


def image_and_text(text: dict[str, Any], **more: Any) -> dict[str, Any]:
    sizes = SIZES | dict(model_type="gemma3_text", sliding_window=5)
    vision = dict(model_type="siglip_vision_model", hidden_size=16, num_hidden_layers=1)
    return dict(model_type="gemma3", text_config=sizes | text, vision_config=vision) | more


LOCAL_ROPES = [
    dict(rope_scaling=dict(rope_type="linear", factor=8.0), rope_theta=5e5),
    dict(
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=5e5),
            sliding_attention=dict(rope_type="linear", factor=2.0, rope_theta=300.0),
        )
    ),
]


@pytest.mark.parametrize("ropes", LOCAL_ROPES, ids=["rope_scaling", "rope_parameters"])
def test_image_and_text_folders_keep_the_scaling_of_the_local_rope(ropes, tmp_path):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    cfg = config_from_hf(image_and_text(ropes | dict(layer_types=types)))
    assert global_rope(cfg) == Rope(theta=5e5, kind="linear", factor=8.0)
    scaled = Rope(theta=300.0, kind="linear", factor=2.0)
    assert local_rope(cfg) == (scaled if "rope_parameters" in ropes else Rope())
    assert config_from_hf(config_to_hf(cfg)) == cfg
    assert config_from_hf(through_transformers(config_to_hf(cfg), tmp_path)) == cfg
    resaved = through_transformers(image_and_text(ropes | dict(layer_types=types)), tmp_path)
    assert config_from_hf(resaved) == cfg


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(model_type="gemma3"), "text_config is missing"),
        (image_and_text({}, hidden_scale=2.0), "hidden_scale is 2.0"),
        (image_and_text(dict(hidden_scale=2.0)), "hidden_scale is 2.0"),
        (image_and_text(dict(model_type="gemma4_text")), "gemma4_text"),
        (image_and_text(dict(tie_word_embeddings=False)), "tie_word_embeddings is True and False"),
        (image_and_text(dict(final_logit_softcapping=30.0)), "final_logit_softcapping is 30.0"),
        (image_and_text(dict(quantization_config=dict(quant_method="gptq"))), "'gptq'"),
        (image_and_text({}, quantization_config=dict(quant_method="gptq")), "'gptq'"),
    ],
    ids=str,
)
def test_fields_of_image_and_text_models_are_checked_at_both_levels(given, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(given)


def test_the_embedding_of_an_image_and_text_model_is_tied_by_the_top_level():
    assert config_from_hf(image_and_text({})).tied
    assert not config_from_hf(image_and_text({}, tie_word_embeddings=False)).tied


TOKENS = dict(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0, use_cache=True)
PUBLISHED = {  # entries other than sizes, as published models have them
    "llama 3.1": config(
        "llama",
        **TOKENS,
        architectures=["LlamaForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        hidden_act="silu",
        initializer_range=0.02,
        mlp_bias=False,
        pretraining_tp=1,
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        torch_dtype="bfloat16",
        transformers_version="4.42.3",
        _name_or_path="meta-llama",
        temperature=0.6,
        do_sample=True,
    ),
    "smollm2": config(
        "llama",
        is_llama_config=True,
        rope_interleaved=False,
        tie_word_embeddings=True,
        **{"transformers.js_config": {"dtype": "q4"}},
    ),
    "yarn llama 2": config(
        "llama",
        auto_map={"AutoConfig": "configuration_llama.LlamaConfig"},
        rope_scaling=YARN | dict(type="yarn", finetuned=True),
    ),
    "qwen2.5": config(
        "qwen2",
        architectures=["Qwen2ForCausalLM"],
        max_window_layers=21,
        sliding_window=131072,
        use_mrope=False,
        use_sliding_window=False,
        rope_theta=1e6,
    ),
    "qwen3 moe": config(
        "qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        decoder_sparse_step=1,
        max_window_layers=48,
        mlp_only_layers=[],
        norm_topk_prob=True,
        output_router_logits=False,
        rope_scaling=None,
        router_aux_loss_coef=0.001,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "qwen3 coder": config(
        "qwen3_moe",
        qkv_bias=False,
        use_qk_norm=True,
        shared_expert_intermediate_size=0,
        router_aux_loss_coef=0.0,
    ),
    "qwen3 next": config(
        "qwen3_next",
        architectures=["Qwen3NextForCausalLM"],
        attention_bias=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        output_router_logits=False,
        partial_rotary_factor=0.25,
        rope_scaling=None,
        rope_theta=10000000,
        router_aux_loss_coef=0.001,
        use_sliding_window=False,
    ),
    "qwen3.5 with experts": dict(
        model_type="qwen3_5_moe",
        architectures=["Qwen3_5MoeForConditionalGeneration"],
        image_token_id=248056,
        video_token_id=248057,
        vision_start_token_id=248053,
        vision_end_token_id=248054,
        vision_config=dict(model_type="qwen3_5_moe", depth=27),
        tie_word_embeddings=False,
        text_config=config(
            "qwen3_5_moe_text",
            attn_output_gate=True,
            mamba_ssm_dtype="float32",
            mlp_only_layers=[],
            mtp_num_hidden_layers=1,
            mtp_use_dedicated_embeddings=False,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            rope_parameters=dict(
                mrope_interleaved=True,
                mrope_section=[1, 1, 0],
                partial_rotary_factor=0.5,
                rope_theta=10000000,
                rope_type="default",
            ),
        ),
    ),
    "qwen2.5 1m": config("qwen2", dual_chunk_attention_config=dict(chunk_size=262144)),
    "falcon 3": config("llama", activation="swiglu", architectures=["LlamaForCausalLM"]),
    "saved by fsdp": config("qwen2", architectures=["FSDPQwen2ForCausalLM"]),
    "classifier": config(
        "qwen3",
        architectures=["Qwen3ForSequenceClassification"],
        id2label={"0": "LABEL_0"},
        label2id={"LABEL_0": 0},
        problem_type="regression",
    ),
    "mixtral": config(
        "mixtral", router_jitter_noise=0.0, router_aux_loss_coef=0.02, sliding_window=None
    ),
    "gpt-oss": config(
        "gpt_oss",
        architectures=["GptOssForCausalLM"],
        experts_per_token=4,
        initial_context_length=4096,
        quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]),
        rope_scaling=YARN | dict(truncate=False, beta_fast=32.0, beta_slow=1.0),
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        swiglu_limit=7.0,
    ),
    "gemma 2": config(
        "gemma2",
        architectures=["Gemma2ForCausalLM"],
        cache_implementation="hybrid",
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=16,
        sliding_window_size=16,
        final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
    ),
    "gemma 3": image_and_text(
        dict(rope_scaling=dict(factor=8.0, rope_type="linear")),
        architectures=["Gemma3ForConditionalGeneration"],
        boi_token_index=255999,
        eoi_token_index=256000,
        image_token_index=262144,
        eos_token_id=[1, 106],
        mm_tokens_per_image=256,
        initializer_range=0.02,
        torch_dtype="bfloat16",
    ),
}


SHAPES = {path.stem: json.loads(path.read_text()) for path in (ROOT / "configs/shapes").iterdir()}


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_reads_the_shipped_shapes_with_the_same_meaning(name, tmp_path):
    cfg = config_from_hf(SHAPES[name])
    assert config_from_hf(through_transformers(SHAPES[name], tmp_path)) == cfg


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_models_are_published_with_are_read(name):
    config_from_hf(PUBLISHED[name])
