"""Qwen3.5, dense, and its successors of the same architecture: Qwen3.6 and 3.8.

Three layers of gated DeltaNet, then one of attention, whose output has a gate and whose heads are
rotated in their first quarter. Definition: transformers' model type `qwen3_5_text`.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import AttentionConfig, DecoderConfig
from jaxrl.models.families import entries, fields, rotary
from jaxrl.models.state_mixers import GatedDeltaNetConfig

LINEAR = "linear_attention"
SIZES = {
    "linear_num_key_heads": 16,  # the defaults are those of transformers
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
ENTRIES = entries.Entries(
    classes=("Qwen3_5", "Qwen3_5Text"),
    read=entries.READ | {"attention_bias", "layer_types", "full_attention_interval", *SIZES},
    # of the drafter, which transformers does not run; of dtypes that are float32 in any case
    neutral=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"}),
    # the convolution has the same activation
    neutral_at={
        "hidden_act": ("silu", "swish"),
        "attn_output_gate": (True,),
        "output_gate_type": ("swish",),
    },
)
# The top level of an image-and-text model; its language model is in text_config.
IMAGE_ENTRIES = entries.Entries(
    classes=("Qwen3_5",),
    read=frozenset(
        {"model_type", "architectures", "auto_map", "text_config", "tie_word_embeddings"}
    ),
    neutral=frozenset(
        {
            *("vision_config", "image_token_id", "video_token_id", "language_model_only"),
            *("vision_start_token_id", "vision_end_token_id"),
        }
    ),
)
DEFAULTS: dict[str, Any] = SIZES | dict(
    num_key_value_heads=4, head_dim=256, partial_rotary_factor=0.25
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for unknown layer types."""
    return hybrid_config(DEFAULTS | dict(c), "qwen3_5")


def hybrid_config(
    c: fields.ConfigJson, family: str, *, fused: bool = False, **more: Any
) -> DecoderConfig:
    """Layers of gated DeltaNet, whose projections may be `fused`, and of attention with a gate.

    `more` are further fields of `uniform_decoder`.
    """
    bias = c.get("attention_bias", False)
    plain = fields.base_config(
        c,
        family,
        rope=rotary.read_rope(c, partial=True, mrope=rotary.INTERLEAVED),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        unit_offset=True,
        **more,
    )
    delta = GatedDeltaNetConfig(*(c[name] for name in SIZES), fused=fused)
    layers = []
    for layer, kind in zip(plain.layers, _layer_types(c), strict=True):
        assert isinstance(layer.mixer, AttentionConfig)
        attention = dataclasses.replace(layer.mixer, gate=True)
        layers.append(dataclasses.replace(layer, mixer=delta if kind == LINEAR else attention))
    return dataclasses.replace(plain, layers=tuple(layers))


def _layer_types(c: fields.ConfigJson) -> list[str]:
    n_layers, period = c["num_hidden_layers"], c.get("full_attention_interval") or 4
    default = [LINEAR if (i + 1) % period else rotary.GLOBAL for i in range(n_layers)]
    types = fields.read_layer_types(c, default, (LINEAR, rotary.GLOBAL))
    if rotary.GLOBAL not in types:
        raise ValueError(
            f"layer_types has no {rotary.GLOBAL}; a model without attention is unknown"
        )
    return types


def text_part(config: fields.ConfigJson) -> fields.ConfigJson:
    """`entries.language_part`."""
    return entries.language_part(config, IMAGE_ENTRIES, "qwen3_5", tied=False)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    return hybrid_json(cfg, "qwen3_5_text", "Qwen3_5ForCausalLM")


def hybrid_json(cfg: DecoderConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """The inverse of `hybrid_config`."""
    mixers = [layer.mixer for layer in cfg.layers]
    delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaNetConfig)), None)
    sizes = SIZES
    if delta is not None:
        sizes = dict(zip(SIZES, (delta.K, delta.N, delta.D, delta.V, delta.conv_len), strict=True))
    attention = cfg.attention_layers[0]
    base = fields.base_json(cfg, model_type, architecture)
    del base["rope_theta"], base["rope_scaling"]
    types = [rotary.GLOBAL if isinstance(m, AttentionConfig) else LINEAR for m in mixers]
    rope = dict(partial_rotary_factor=attention.rope.rotary)  # a missing one is 0.25
    rope |= rotary.parameters_json(attention.rope)
    return (
        base
        | sizes
        | dict(attention_bias=attention.qkv_bias, layer_types=types, rope_parameters=rope)
    )
