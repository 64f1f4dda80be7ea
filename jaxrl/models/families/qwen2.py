"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): biases on query, key and value."""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields

ENTRIES = entries.Entries(
    classes=("Qwen2",),
    read=entries.READ | entries.LATER_LEN | entries.QWEN_WINDOWS | {"hidden_act"},
    # the class has its biases in any case; transformers computes no dual chunks
    neutral=frozenset({"attention_bias", "dual_chunk_attention_config"}),
)
DEFAULTS: dict[str, Any] = dict(num_key_value_heads=32)  # of transformers


def used_window(c: fields.ConfigJson) -> int | None:
    """`sliding_window` if `use_sliding_window` is set."""
    return c.get("sliding_window", 4096) if c.get("use_sliding_window", False) else None


def windows(c: fields.ConfigJson) -> tuple[int, ...]:
    """Windows of the layers from `max_window_layers` on, or by `layer_types`."""
    window, first = used_window(c), c.get("max_window_layers", 28)
    n_layers = c["num_hidden_layers"]
    local = [window is not None and i >= first for i in range(n_layers)]
    types = [fields.LOCAL if is_local else fields.GLOBAL for is_local in local]
    return fields.read_windows(c, window, types)


def windows_json(cfg: DecoderConfig) -> dict[str, Any]:
    """The inverse of `windows`."""
    local = [i for i in range(cfg.L) if cfg.window(i)]
    return dict(
        use_sliding_window=bool(local),
        sliding_window=cfg.window(local[0]) if local else None,
        max_window_layers=local[0] if local else cfg.L,
        layer_types=fields.layer_types(cfg),
    )


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    return fields.base_config(DEFAULTS | dict(c), "qwen2", windows=windows(c), qkv_bias=True)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    return fields.base_json(cfg, "qwen2", "Qwen2ForCausalLM") | windows_json(cfg)
