"""Qwen3, dense (https://arxiv.org/abs/2505.09388): queries and keys normalized per head."""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import fields, qwen2


def from_hf(c: fields.Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return dataclasses.replace(
        fields.base_config({"head_dim": 128} | dict(c), "qwen3"),
        windows=qwen2.windows(c),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "qwen3", "Qwen3ForCausalLM")
    return base | qwen2.windows_json(cfg) | dict(attention_bias=cfg.qkv_bias)
