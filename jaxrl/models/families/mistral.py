"""Mistral 7B and its successors (https://arxiv.org/abs/2310.06825): one window for all layers."""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import fields


def from_hf(c: fields.Json) -> DecoderConfig:
    return DecoderConfig(
        family="mistral",
        rope=fields.read_rope(c),
        windows=fields.read_windows(c, [fields.LOCAL] * c["num_hidden_layers"]),
        **fields.sizes(c),
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.sizes_json(cfg, "mistral", "MistralForCausalLM")
    return base | dict(sliding_window=cfg.window(0) or None)
