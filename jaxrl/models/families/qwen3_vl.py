"""Qwen3-VL, dense: the language model of an image-and-text model.

It is Qwen3 with positions of images (M-RoPE, interleaved). Definition: transformers' model type
`qwen3_vl_text`.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, qwen3, rotary

ENTRIES = entries.Entries(
    classes=("Qwen3VL", "Qwen3VLText"),
    read=entries.READ | {"hidden_act", "attention_bias"},
)
# The top level of an image-and-text model; its language model is in text_config.
IMAGE_ENTRIES = entries.Entries(
    classes=("Qwen3VL",),
    read=frozenset(
        {"model_type", "architectures", "auto_map", "text_config", "tie_word_embeddings"}
    ),
    neutral=frozenset(
        {
            *("vision_config", "image_token_id", "video_token_id"),
            *("vision_start_token_id", "vision_end_token_id"),
        }
    ),
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return fields.base_config(
        qwen3.DEFAULTS | dict(c),
        "qwen3_vl",
        rope=rotary.read_rope(c, theta=500_000.0, mrope=rotary.INTERLEAVED),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def text_part(config: fields.ConfigJson) -> fields.ConfigJson:
    """`entries.language_part`."""
    return entries.language_part(config, IMAGE_ENTRIES, "qwen3_vl", tied=False)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    """An export has no class in transformers, which knows the image-and-text model only."""
    base = fields.base_json(cfg, "qwen3_vl_text", "Qwen3VLForCausalLM")
    return rotary.with_parameters(base, cfg.attention_layers[0].rope) | dict(
        attention_bias=cfg.attention_layers[0].qkv_bias
    )
