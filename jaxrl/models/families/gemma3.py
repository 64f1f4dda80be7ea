"""Gemma 3, text (https://arxiv.org/abs/2503.19786).

Five local layers per global one, each kind with its own rotary base; queries and keys are
normalized per head.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import fields
from jaxrl.models.families.gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from jaxrl.models.families.gemma2 import gemma_config, gemma_json

# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = GEMMA2_DEFAULTS | dict(
    vocab_size=262_208,
    max_position_embeddings=131_072,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
)


def local_rope_json(c: fields.Json) -> fields.Json:
    """The config as its local layers read it: their own base and no scaling."""
    if c.get("rope_parameters"):
        return c
    return dict(rope_theta=c.get("rope_local_base_freq", 10_000.0))


def from_hf(c: fields.Json) -> DecoderConfig:
    c = DEFAULTS | dict(c)
    period = c.get("sliding_window_pattern") or 6
    return dataclasses.replace(
        gemma_config(c, "gemma3", period=period, theta=1_000_000.0),
        local_rope=fields.read_rope(local_rope_json(c), kind=fields.LOCAL),
        qk_norm=True,
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    local = cfg.local_rope or cfg.rope
    base = gemma_json(cfg, "gemma3_text", "Gemma3ForCausalLM")
    return base | dict(rope_local_base_freq=local.theta)
