"""OLMo 3 (https://arxiv.org/abs/2512.13961): OLMo 2 with windows in three of four layers.

A rotary scaling is one of the layers without a window only.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, gemma3, olmo2, rotary

THETA = 500_000.0  # transformers' default, and the base of windows unless rope_parameters has one
ENTRIES = entries.Entries(
    classes=("Olmo3",),
    read=(entries.READ - {"partial_rotary_factor"})
    | entries.WINDOWS
    | {"hidden_act", "attention_bias"},
)
DEFAULTS: dict[str, Any] = olmo2.DEFAULTS | dict(sliding_window=4096)  # of transformers


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for rotary entries that transformers ignores."""
    c = DEFAULTS | dict(c)
    rope, local = rotary.read_layer_ropes(c, "olmo3", theta=THETA, local_theta=THETA)
    types = fields.local_global_pattern(c["num_hidden_layers"], 4)
    windows = fields.read_windows(c, c["sliding_window"], types)
    return olmo2.olmo_config(c, "olmo3", windows=windows, rope=rope, local_rope=local)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "olmo3", "Olmo3ForCausalLM") | dict(
        attention_bias=cfg.attention_layers[0].qkv_bias,
        sliding_window=fields.largest_window(cfg),
        layer_types=fields.layer_types(cfg),
    )
    rope, local = fields.global_rope(cfg), gemma3.local_rope(cfg)
    if (local.kind, local.theta) == ("default", THETA):
        return base
    # Only the newer entry has another base or a scaling of the layers with a window.
    by_type = {rotary.GLOBAL: rope, rotary.LOCAL: local}
    parameters = {name: rotary.parameters_json(one) for name, one in by_type.items()}
    return base | dict(rope_parameters=parameters)
