"""Mistral 7B and its successors (https://arxiv.org/abs/2310.06825): one window for all layers."""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import fields


def from_hf(c: fields.Json) -> DecoderConfig:
    return dataclasses.replace(
        fields.base_config(c, "mistral"),
        windows=fields.read_windows(c, [fields.LOCAL] * c["num_hidden_layers"]),
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "mistral", "MistralForCausalLM")
    return base | dict(sliding_window=cfg.window(0) or None)
