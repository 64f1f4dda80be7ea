"""Qwen3, dense (https://arxiv.org/abs/2505.09388): queries and keys normalized per head."""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import fields, qwen2


def from_hf(c: fields.Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        family="qwen3",
        rope=fields.read_rope(c),
        windows=qwen2.windows(c),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        **fields.sizes({"head_dim": 128} | dict(c)),
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.sizes_json(cfg, "qwen3", "Qwen3ForCausalLM")
    return base | qwen2.windows_json(cfg) | dict(attention_bias=cfg.qkv_bias)
