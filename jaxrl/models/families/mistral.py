"""Mistral 7B and its successors (https://arxiv.org/abs/2310.06825): one window for all layers.

With `layer_types`, transformers reads a config of this type as Ministral: windows by layer.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields

ENTRIES = entries.Entries(
    classes=("Mistral", "Ministral"),
    read=entries.READ | entries.LATER_LEN | entries.WINDOWS | {"hidden_act"},
)
DEFAULTS: dict[str, Any] = dict(num_key_value_heads=8, sliding_window=4096)  # of transformers


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    c = DEFAULTS | dict(c)
    window = c["sliding_window"]
    windows = fields.read_windows(c, window, fields.uniform_types(c, window))
    return fields.base_config(c, "mistral", windows=windows)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "mistral", "MistralForCausalLM")
    types = fields.layer_types(cfg)
    by_layer = dict(layer_types=types) if len(set(types)) > 1 else {}
    return base | dict(sliding_window=fields.largest_window(cfg)) | by_layer
