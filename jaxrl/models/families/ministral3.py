"""Ministral 3 (3B, 8B, 14B), text: YaRN, and queries that grow with their position.

Definition: transformers' model type `ministral3`.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, rotary

ENTRIES = entries.Entries(
    classes=("Ministral3",),
    read=entries.READ | entries.WINDOWS | {"hidden_act"},
)
DEFAULTS: dict[str, Any] = dict(  # of transformers
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=1_000_000.0,
        factor=16.0,
        original_max_position_embeddings=16384,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1,
    ),
)
GROWTH = "llama_4_scaling_beta"


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError without llama_4_scaling_beta, which transformers needs."""
    c = DEFAULTS | {name: value for name, value in c.items() if value is not None}
    if c.get("rope_scaling"):
        raise ValueError("rope_scaling of ministral3 models is not read; write rope_parameters")
    given = dict(c["rope_parameters"])
    given.pop("max_position_embeddings", None)  # a copy of the top level's
    growth = given.pop(GROWTH, None)
    if growth is None or rotary.ORIGINAL_LEN not in given:
        raise ValueError(f"rope_parameters lacks {GROWTH} or {rotary.ORIGINAL_LEN}; write both")
    rope = rotary.read_rope(c | dict(rope_parameters=given))
    rope = dataclasses.replace(
        rope, query_growth=float(growth), original_len=given[rotary.ORIGINAL_LEN]
    )
    window = c.get("sliding_window")
    windows = fields.uniform_windows(c, window)
    return fields.base_config(c, "ministral3", windows=windows, rope=rope)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    rope = cfg.attention_layers[0].rope
    base = fields.base_json(cfg, "ministral3", "Ministral3ForCausalLM")
    del base["rope_theta"], base["rope_scaling"]
    parameters = rotary.parameters_json(rope) | {
        GROWTH: rope.query_growth,
        rotary.ORIGINAL_LEN: rope.original_len,
    }
    return base | dict(rope_parameters=parameters, sliding_window=fields.largest_window(cfg))
