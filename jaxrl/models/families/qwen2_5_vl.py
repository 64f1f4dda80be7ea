"""Qwen2.5-VL: the language model of an image-and-text model.

It is Qwen2 with positions of images (M-RoPE, in chunks). Definition: transformers' model type
`qwen2_5_vl_text`.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, qwen2, rotary

ENTRIES = entries.Entries(
    classes=("Qwen2_5_VL", "Qwen2_5_VLText"),
    read=entries.READ | entries.QWEN_WINDOWS | {"hidden_act"},
)
# The top level of an image-and-text model; its language model is in text_config.
IMAGE_ENTRIES = entries.Entries(
    classes=("Qwen2_5_VL",),
    read=frozenset(
        {"model_type", "architectures", "auto_map", "text_config", "tie_word_embeddings"}
    ),
    neutral=frozenset(
        {
            *("vision_config", "image_token_id", "video_token_id", "vision_token_id"),
            *("vision_start_token_id", "vision_end_token_id"),
        }
    ),
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=8, rms_norm_eps=1e-5, max_window_layers=80, max_position_embeddings=32_768
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    c = DEFAULTS | dict(c)
    H = c["hidden_size"] // c["num_attention_heads"]
    if c.get("head_dim") not in (None, H):
        raise ValueError(
            f"head_dim is {c['head_dim']}, which transformers does not read for qwen2_5_vl models: "
            f"their heads have hidden_size / num_attention_heads = {H} features; remove it"
        )
    rope = rotary.read_rope(c, theta=1_000_000.0, mrope=rotary.CHUNKED)
    windows = qwen2.windows(c)
    return fields.base_config(c, "qwen2_5_vl", rope=rope, windows=windows, qkv_bias=True)


def text_part(config: fields.ConfigJson) -> fields.ConfigJson:
    """`entries.language_part`; published files have its entries at the top level."""
    if not config.get("text_config"):
        images = IMAGE_ENTRIES.neutral
        text = {name: value for name, value in config.items() if name not in images}
        config = {name: value for name, value in config.items() if name not in text}
        config |= dict(text_config=text | dict(model_type="qwen2_5_vl_text"))
    text = config["text_config"]
    tied = text.get("tie_word_embeddings", False)  # older files have it here only
    return entries.language_part(config, IMAGE_ENTRIES, "qwen2_5_vl", tied=tied)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    """An export has no class in transformers, which knows the image-and-text model only."""
    base = fields.base_json(cfg, "qwen2_5_vl_text", "Qwen2_5_VLForCausalLM")
    return rotary.with_parameters(base, cfg.attention_layers[0].rope) | qwen2.windows_json(cfg)
