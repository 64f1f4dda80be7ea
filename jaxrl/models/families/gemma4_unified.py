"""Gemma 4 12B, text: a dense Gemma 4 without inputs of each layer by token.

Images and audio are projected into it without a tower. Definition: transformers' model type
`gemma4_unified_text`.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, gemma4

ENTRIES = entries.Entries(
    classes=("Gemma4Unified",),
    read=gemma4.READ,
    neutral=frozenset({"vocab_size_per_layer_input"}),  # the size of a table that it has not
)
IMAGE_ENTRIES = dataclasses.replace(gemma4.IMAGE_ENTRIES, classes=ENTRIES.classes)
DEFAULTS: dict[str, Any] = gemma4.DEFAULTS | dict(
    max_position_embeddings=262_144,
    sliding_window=1024,
    use_bidirectional_attention="vision",
    hidden_size_per_layer_input=0,
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    return gemma4.decoder_config(DEFAULTS | dict(c), "gemma4_unified")


def text_part(config: fields.ConfigJson) -> fields.ConfigJson:
    """`entries.language_part`."""
    return entries.language_part(config, IMAGE_ENTRIES, "gemma4_unified", tied=True)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = gemma4.to_hf(cfg)
    absent = gemma4.TOKEN_INPUTS | gemma4.EXPERTS
    return {name: value for name, value in base.items() if name not in absent} | dict(
        model_type="gemma4_unified_text", architectures=["Gemma4UnifiedForCausalLM"]
    )
