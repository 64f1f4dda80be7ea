"""SmolLM3: every fourth layer has no rotary embedding.

Definition: transformers' model type `smollm3`.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig, MLPConfig
from jaxrl.models.families import entries, fields, qwen2
from jaxrl.models.rope_config import NO_ROPE

ENTRIES = entries.Entries(
    classes=("SmolLM3",),
    read=entries.READ
    | entries.LATER_LEN
    | entries.WINDOWS
    | {
        *("hidden_act", "attention_bias", "mlp_bias", "use_sliding_window"),
        *("no_rope_layers", "no_rope_layer_interval"),
    },
    neutral=frozenset({"max_window_layers"}),
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=4,
    tie_word_embeddings=True,
    rope_theta=2_000_000.0,
    sliding_window=None,
    no_rope_layer_interval=4,
)


def rotates(c: fields.ConfigJson) -> list[bool]:
    """Whether each layer has a rotary embedding. In no_rope_layers, 1 means that it has.

    Raises ValueError for another number of layers.
    """
    n, period = c["num_hidden_layers"], c["no_rope_layer_interval"]
    found = c.get("no_rope_layers")
    if found is None:
        return [(i + 1) % period != 0 for i in range(n)]
    if len(found) != n:
        raise ValueError(f"no_rope_layers has {len(found)} entries for {n} layers")
    return [bool(one) for one in found]


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for windows without use_sliding_window."""
    c = DEFAULTS | dict(c)
    bias, window = c.get("attention_bias", False), qwen2.used_window(c)
    rotary = rotates(c)
    types = [fields.GLOBAL if one or window is None else fields.LOCAL for one in rotary]
    cfg = fields.base_config(
        c,
        "smollm3",
        windows=fields.read_windows(c, window, types),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=c.get("mlp_bias", False),
    )
    return fields.without_rope(cfg, [i for i, one in enumerate(rotary) if not one])


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    window, ffn = fields.largest_window(cfg), cfg.layers[0].ffn
    assert isinstance(ffn, MLPConfig)
    return fields.base_json(cfg, "smollm3", "SmolLM3ForCausalLM") | dict(
        attention_bias=cfg.attention_layers[0].qkv_bias,
        mlp_bias=ffn.bias,
        use_sliding_window=window is not None,
        sliding_window=window,
        layer_types=fields.layer_types(cfg),
        no_rope_layers=[int(mixer.rope.kind != NO_ROPE) for mixer in cfg.attention_layers],
    )
