"""Seed-OSS (36B): biases of queries, keys and values, and one of the output by its own entry.

Definition: transformers' model type `seed_oss`.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig, MLPConfig
from jaxrl.models.families import entries, fields

ENTRIES = entries.Entries(
    classes=("SeedOss",),
    read=entries.READ
    | entries.LATER_LEN
    | {"hidden_act", "attention_bias", "attention_out_bias", "mlp_bias"},
    neutral=frozenset({"attention_dropout", "residual_dropout"}),
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=8, head_dim=128, attention_bias=True, attention_out_bias=False
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    c = DEFAULTS | dict(c)
    return fields.base_config(
        c,
        "seed_oss",
        windows=fields.uniform_windows(c, None),
        qkv_bias=c["attention_bias"],
        o_bias=c["attention_out_bias"],
        mlp_bias=c.get("mlp_bias", False),
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    mixer, ffn = cfg.attention_layers[0], cfg.layers[0].ffn
    assert isinstance(ffn, MLPConfig)
    return fields.base_json(cfg, "seed_oss", "SeedOssForCausalLM") | dict(
        attention_bias=mixer.qkv_bias, attention_out_bias=mixer.o_bias, mlp_bias=ffn.bias
    )
