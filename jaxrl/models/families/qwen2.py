"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): biases on query, key and value."""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import fields


def windows(c: fields.Json) -> tuple[int, ...]:
    """Windows of the layers from `max_window_layers` on; () unless `use_sliding_window` is set."""
    if not c.get("use_sliding_window", False):
        return ()
    first = c.get("max_window_layers", 28)
    n_layers = c["num_hidden_layers"]
    types = [fields.LOCAL if i >= first else fields.GLOBAL for i in range(n_layers)]
    return fields.read_windows({"sliding_window": 4096} | dict(c), types)


def windows_json(cfg: DecoderConfig) -> dict[str, Any]:
    """The inverse of `windows`."""
    local = [i for i in range(cfg.L) if cfg.window(i)]
    return dict(
        use_sliding_window=bool(local),
        sliding_window=cfg.window(local[0]) if local else None,
        max_window_layers=local[0] if local else cfg.L,
        layer_types=fields.layer_types(cfg),
    )


def from_hf(c: fields.Json) -> DecoderConfig:
    return dataclasses.replace(
        fields.base_config(c, "qwen2"),
        windows=windows(c),
        qkv_bias=True,
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    return fields.base_json(cfg, "qwen2", "Qwen2ForCausalLM") | windows_json(cfg)
