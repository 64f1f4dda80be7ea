"""Command R7B and Command A (https://arxiv.org/abs/2504.00698).

Mixer and MLP of a layer have the same input; layers without a window have no rotary embedding, the
others rotate pairs of adjacent features; the logits have a factor. Definition: transformers' model
type `cohere2`.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig, NormNames
from jaxrl.models.families import entries, fields, rotary

NORMS: NormNames = ("input_layernorm", None, None, None)
ENTRIES = entries.Entries(
    classes=("Cohere2",),
    read=(entries.READ - {"rms_norm_eps"})
    | entries.LATER_LEN
    | entries.WINDOWS
    | {"hidden_act", "attention_bias", "layer_norm_eps", "logit_scale", "sliding_window_pattern"},
    # notes of the published files on what the class always does
    neutral=frozenset({"layer_switch", "cache_implementation", "_sliding_window_pattern"}),
    neutral_at={
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
        "use_embedding_sharing": (True,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_parallel_embedding": (True, False),
    },
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    layer_norm_eps=1e-5, logit_scale=0.0625, tie_word_embeddings=True, sliding_window=4096
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for another head size than that of the class."""
    c = DEFAULTS | dict(c)
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    if (found := c.get("head_dim")) not in (None, head_dim):
        raise ValueError(f"head_dim is {found}, and heads of cohere2 models have {head_dim}")
    bias = c.get("attention_bias", False)
    period = 1 if c.get("layer_types") else fields.read_period(c, 4)
    types = fields.local_global_pattern(c["num_hidden_layers"], period)
    cfg = fields.base_config(
        c,
        "cohere2",
        eps="layer_norm_eps",
        windows=fields.read_windows(c, c["sliding_window"], types),
        rope=dataclasses.replace(rotary.read_rope(c), interleaved=True),
        qkv_bias=bias,
        o_bias=bias,
        norms=NORMS,
        parallel=True,
        layer_norm=True,
        logit_scale=float(c["logit_scale"]),
    )
    return fields.without_rope(cfg, fields.global_layers(cfg))


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "cohere2", "Cohere2ForCausalLM")
    return base | dict(
        layer_norm_eps=base.pop("rms_norm_eps"),
        attention_bias=cfg.attention_layers[0].qkv_bias,
        logit_scale=cfg.logit_scale,
        sliding_window=fields.largest_window(cfg),
        layer_types=fields.layer_types(cfg),
    )
