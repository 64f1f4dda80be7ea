"""Muse Glimmer, text: windows, and every fourth layer over all tokens without a rotary embedding.

The output of attention has a gate; queries and keys have norms without weights; the embedding has
one too. Definition: transformers' model type `muse_glimmer_text`.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import BOTH_NORMS, DecoderConfig
from jaxrl.models.families import entries, fields, rotary
from jaxrl.models.rope_config import NO_ROPE

ENTRIES = entries.Entries(
    classes=("MuseGlimmer",),
    read=(entries.READ - {"partial_rotary_factor"})
    | entries.LATER_LEN
    | entries.WINDOWS
    | {
        *("hidden_activation", "attention_bias", "final_logit_softcapping", "layer_rope_theta"),
        *("output_multiplier", "post_norm_eps", "qk_scale_factor"),
    },
)
# The top level of an image-and-text model; its language model is in text_config.
IMAGE_ENTRIES = entries.Entries(
    classes=("MuseGlimmer",),
    read=frozenset(
        {"model_type", "architectures", "auto_map", "text_config", "tie_word_embeddings"}
    ),
    neutral=frozenset(
        {
            *("vision_config", "image_token_id", "video_token_id", "out_hidden_size"),
            *("projector_hidden_size", "projector_hidden_act"),
        }
    ),
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1e-5,
    sliding_window=2048,
    final_logit_softcapping=20.0,
    qk_scale_factor=3.87,
    output_multiplier=0.19611613513818404,
    post_norm_eps=1e-8,
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for a base of the rotary embedding that differs between layers."""
    c = DEFAULTS | dict(c)
    bias, n = c.get("attention_bias", False), c["num_hidden_layers"]
    last = [(n - 1 - i) % 4 == 0 for i in range(n)]
    types = [rotary.GLOBAL if one else rotary.LOCAL for one in last]
    rope = rotary.read_rope(c)
    thetas = c.get("layer_rope_theta") or [0 if one else rope.theta for one in last]
    if len(thetas) != n or set(thetas) - {0, rope.theta}:
        raise ValueError(
            f"layer_rope_theta is {thetas}; {n} numbers are supported, each 0 or the rope_theta "
            f"{rope.theta:g} of all layers, which is the one that transformers uses"
        )
    cfg = fields.base_config(
        c,
        "muse_glimmer",
        act="hidden_activation",
        windows=fields.read_windows(c, c["sliding_window"], types),
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        norms=BOTH_NORMS,
        unit_offset=True,
        final_unit_offset=False,
        post_norm_eps=float(c["post_norm_eps"]),
        embed_norm=True,
        attn_scale=c["qk_scale_factor"] * c["head_dim"] ** -0.5,
        logit_scale=float(c["output_multiplier"]),
        logit_softcap=float(c["final_logit_softcapping"]),
    )
    gated = dict(gate=True, gate_in_q=False, norm_weights=False)
    layers = tuple(
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **gated))
        for layer in cfg.layers
    )
    cfg = dataclasses.replace(cfg, layers=layers)
    return fields.without_rope(cfg, [i for i, theta in enumerate(thetas) if not theta])


def text_part(config: fields.ConfigJson) -> fields.ConfigJson:
    """`entries.language_part`."""
    return entries.language_part(config, IMAGE_ENTRIES, "muse_glimmer", tied=False)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    attention, rope = cfg.attention_layers[0], fields.global_rope(cfg)
    base = fields.base_json(cfg, "muse_glimmer_text", "MuseGlimmerForCausalLM")
    del base["rope_theta"], base["rope_scaling"]
    rotated = [mixer.rope.kind != NO_ROPE for mixer in cfg.attention_layers]
    return base | dict(
        hidden_activation=base.pop("hidden_act"),
        attention_bias=attention.qkv_bias,
        sliding_window=fields.largest_window(cfg),
        layer_types=fields.layer_types(cfg),
        rope_parameters=rotary.parameters_json(rope),
        layer_rope_theta=[rope.theta if one else 0 for one in rotated],
        final_logit_softcapping=cfg.logit_softcap,
        qk_scale_factor=attention.score_scale * attention.H**0.5,
        output_multiplier=cfg.logit_scale,
        post_norm_eps=cfg.post_norm_eps,
    )
