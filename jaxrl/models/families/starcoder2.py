"""StarCoder2 (https://arxiv.org/abs/2402.19173): layer norms, an MLP without a gate, biases."""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields

ENTRIES = entries.Entries(
    classes=("Starcoder2",),
    read=(entries.READ - {"rms_norm_eps"})
    | entries.LATER_LEN
    | entries.WINDOWS
    | {"hidden_act", "norm_epsilon", "use_bias"},
    neutral=frozenset({"attention_dropout", "embedding_dropout", "residual_dropout"}),
    neutral_at={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=2,
    hidden_act="gelu_pytorch_tanh",
    norm_epsilon=1e-5,
    use_bias=True,
    tie_word_embeddings=True,
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    c = DEFAULTS | dict(c)
    bias = c["use_bias"]
    return fields.base_config(
        c,
        "starcoder2",
        eps="norm_epsilon",
        windows=fields.uniform_windows(c, c.get("sliding_window")),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        mlp_gated=False,
        layer_norm=True,
        norm_bias=True,
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "starcoder2", "Starcoder2ForCausalLM")
    return base | dict(
        norm_epsilon=base.pop("rms_norm_eps"),
        use_bias=cfg.attention_layers[0].qkv_bias,
        sliding_window=fields.largest_window(cfg),
    )
