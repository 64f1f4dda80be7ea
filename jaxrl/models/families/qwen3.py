"""Qwen3, dense (https://arxiv.org/abs/2505.09388): queries and keys normalized per head."""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, qwen2

ENTRIES = entries.Entries(
    classes=("Qwen3",),
    read=entries.READ | entries.LATER_LEN | entries.QWEN_WINDOWS | {"hidden_act", "attention_bias"},
    neutral=frozenset({"dual_chunk_attention_config"}),
    neutral_at={"use_qk_norm": (True,)},
)
DEFAULTS: dict[str, Any] = dict(num_key_value_heads=32, head_dim=128)  # of transformers


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return fields.base_config(
        DEFAULTS | dict(c),
        "qwen3",
        windows=qwen2.windows(c),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "qwen3", "Qwen3ForCausalLM")
    return base | qwen2.windows_json(cfg) | dict(attention_bias=cfg.attention_layers[0].qkv_bias)
