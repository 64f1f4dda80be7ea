"""EXAONE 4.0 (https://arxiv.org/abs/2507.11407): norms only after the mixer and the MLP.

In models with windows, layers without one have no rotary embedding.
"""

from typing import Any

from jaxrl.models.config import POST_NORMS, DecoderConfig
from jaxrl.models.families import entries, fields
from jaxrl.models.rope_config import NO_ROPE

ENTRIES = entries.Entries(
    classes=("Exaone4",),
    read=entries.READ
    | entries.LATER_LEN
    | entries.WINDOWS
    | {"hidden_act", "sliding_window_pattern"},
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    c = DEFAULTS | dict(c)
    n, window = c["num_hidden_layers"], c["sliding_window"]
    types = [fields.GLOBAL] * n
    if window is not None and not c.get("layer_types"):
        types = fields.local_global_pattern(n, fields.read_period(c, 4))
    windows = fields.read_windows(c, window, types)
    cfg = fields.base_config(c, "exaone4", windows=windows, qk_norm=True, norms=POST_NORMS)
    return cfg if window is None else fields.without_rope(cfg, fields.global_layers(cfg))


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    window = fields.largest_window(cfg)
    if cfg.attention_layers[0].rope.kind == NO_ROPE:  # a model with windows, also if none is used
        window = window or DEFAULTS["sliding_window"]
    base = fields.base_json(cfg, "exaone4", "Exaone4ForCausalLM")
    return base | dict(sliding_window=window, layer_types=fields.layer_types(cfg))
