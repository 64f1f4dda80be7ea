"""GLM-4-0414, dense (9B and 32B).

Norms before and after the mixer and the MLP, under names of the family; half of each head is
rotated, in pairs of adjacent features. Definition: transformers' model type `glm4`.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig, NormNames
from jaxrl.models.families import entries, fields, rotary

ENTRIES = entries.Entries(
    classes=("Glm4",),
    read=entries.READ | entries.LATER_LEN | {"hidden_act", "attention_bias"},
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1.5625e-7,
    attention_bias=True,
    partial_rotary_factor=0.5,
)
NORMS: NormNames = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    c = DEFAULTS | dict(c)
    rope = dataclasses.replace(rotary.read_rope(c, partial=True), interleaved=True)
    return fields.base_config(
        c,
        "glm4",
        windows=fields.uniform_windows(c, None),
        rope=rope,
        qkv_bias=c["attention_bias"],
        mlp_fused=True,
        norms=NORMS,
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    mixer = cfg.attention_layers[0]
    return fields.base_json(cfg, "glm4", "Glm4ForCausalLM") | dict(
        attention_bias=mixer.qkv_bias, partial_rotary_factor=mixer.rope.rotary
    )
