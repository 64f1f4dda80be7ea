"""Granite 3 and 4, dense (https://arxiv.org/abs/2407.13739): factors of embedding, scores, residual
stream and logits.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig, MLPConfig
from jaxrl.models.families import entries, fields

ENTRIES = entries.Entries(
    classes=("Granite",),
    read=entries.READ
    | entries.LATER_LEN
    | {
        *("hidden_act", "attention_bias", "mlp_bias", "embedding_multiplier", "logits_scaling"),
        *("residual_multiplier", "attention_multiplier"),
    },
    neutral=frozenset({"attention_dropout"}),
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return fields.base_config(
        c,
        "granite",
        windows=fields.uniform_windows(c, None),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=c.get("mlp_bias", False),
        attn_scale=float(c.get("attention_multiplier", 1.0)),
        embed_scale=float(c.get("embedding_multiplier", 1.0)),
        residual_scale=float(c.get("residual_multiplier", 1.0)),
        logit_scale=1 / c.get("logits_scaling", 1.0),
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    mixer, ffn = cfg.attention_layers[0], cfg.layers[0].ffn
    assert isinstance(ffn, MLPConfig)
    return fields.base_json(cfg, "granite", "GraniteForCausalLM") | dict(
        attention_bias=mixer.qkv_bias,
        mlp_bias=ffn.bias,
        attention_multiplier=mixer.score_scale,
        embedding_multiplier=cfg.embed_scale,
        residual_multiplier=cfg.residual_scale,
        logits_scaling=1 / cfg.logit_scale,
    )
