"""Gemma (https://arxiv.org/abs/2403.08295): norms scale by 1 + w, and the embedding by √D."""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields

ENTRIES = entries.Entries(
    classes=("Gemma",),
    read=entries.READ
    | entries.LATER_LEN
    | {"hidden_act", "attention_bias", "use_bidirectional_attention"},
    neutral=frozenset({"hidden_activation"}),  # transformers reads hidden_act
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=16,
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for attention to later tokens."""
    c = DEFAULTS | dict(c)
    if c.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported; use a causal checkpoint")
    if c["hidden_act"] == "gelu":  # of the first release, which means the approximation
        c["hidden_act"] = DEFAULTS["hidden_act"]
    bias = c.get("attention_bias", False)
    return fields.base_config(
        c,
        "gemma",
        windows=fields.uniform_windows(c, None),
        qkv_bias=bias,
        o_bias=bias,
        unit_offset=True,
        embed_scale=c["hidden_size"] ** 0.5,
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "gemma", "GemmaForCausalLM")
    return base | dict(attention_bias=cfg.attention_layers[0].qkv_bias)
