"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783); also SmolLM2 and TinyLlama."""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import fields


def from_hf(c: fields.Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        family="llama",
        rope=fields.read_rope(c),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=c.get("mlp_bias", False),
        **fields.sizes(c),
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.sizes_json(cfg, "llama", "LlamaForCausalLM")
    return base | dict(attention_bias=cfg.qkv_bias, mlp_bias=cfg.mlp_bias)
