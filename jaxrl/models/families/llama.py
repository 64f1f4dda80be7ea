"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783); also SmolLM2 and TinyLlama."""

from typing import Any

from jaxrl.models.config import DecoderConfig, MLPConfig
from jaxrl.models.families import entries, fields

ENTRIES = entries.Entries(
    classes=("Llama",),
    read=entries.READ
    | entries.LATER_LEN
    | {"hidden_act", "attention_bias", "mlp_bias", "layer_types"},
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return fields.base_config(
        c,
        "llama",
        windows=fields.uniform_windows(c, None),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=c.get("mlp_bias", False),
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "llama", "LlamaForCausalLM")
    mixer, ffn = cfg.attention_layers[0], cfg.layers[0].ffn
    assert isinstance(ffn, MLPConfig)
    return base | dict(attention_bias=mixer.qkv_bias, mlp_bias=ffn.bias)
