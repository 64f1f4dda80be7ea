"""LFM2: gated short convolutions, and attention in some layers (https://arxiv.org/abs/2511.23404).

Definition: transformers' model type `lfm2`.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import AttentionConfig, DecoderConfig, MLPNames, NormNames
from jaxrl.models.families import entries, fields, rotary
from jaxrl.models.state_mixers import ShortConvConfig

CONV = "conv"
NORMS: NormNames = ("operator_norm", None, "ffn_norm", None)
ATTENTION_NAMES = ("out_proj", "q_layernorm", "k_layernorm")
MLP_NAMES: MLPNames = ("feed_forward", "w1", "w3", "w2")
ENTRIES = entries.Entries(
    classes=("Lfm2",),
    read=(entries.READ - {"rms_norm_eps", "partial_rotary_factor"})
    | entries.LATER_LEN
    | {
        *("norm_eps", "conv_bias", "conv_L_cache", "layer_types", "full_attn_idxs"),
        *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
        *("tie_embedding", "block_ff_dim"),
    },
    # notes of the published files, which the class does not read
    neutral=frozenset(
        {
            *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
            *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init"),
            "num_heads",
        }
    ),
    neutral_at={"block_use_swiglu": (True,), "theta": (1e6,), "use_pos_enc": (True,)},
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    intermediate_size=12288,
    num_key_value_heads=8,
    norm_eps=1e-5,
    tie_word_embeddings=True,
    conv_bias=False,
    conv_L_cache=3,
    block_auto_adjust_ff_dim=True,
    block_ffn_dim_multiplier=1.0,
    block_multiple_of=256,
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for unknown layer types."""
    c = DEFAULTS | dict(c)
    c["tie_word_embeddings"] = c.get("tie_embedding", c["tie_word_embeddings"])
    cfg = fields.base_config(
        c | dict(intermediate_size=mlp_width(c)),
        "lfm2",
        eps="norm_eps",
        rope=rotary.read_rope(c, theta=1_000_000.0),
        qk_norm=True,
        norms=NORMS,
        final_norm="model.embedding_norm",
    )
    N = c["num_attention_heads"]
    conv = ShortConvConfig(N, cfg.D // N, c["conv_L_cache"], c["conv_bias"])
    layers = []
    for layer, kind in zip(cfg.layers, layer_types(c), strict=True):
        attention = dataclasses.replace(layer.mixer, names=ATTENTION_NAMES)
        mlp = dataclasses.replace(layer.ffn, names=MLP_NAMES)
        mixer = conv if kind == CONV else attention
        layers.append(dataclasses.replace(layer, mixer=mixer, ffn=mlp))
    return dataclasses.replace(cfg, layers=tuple(layers))


def mlp_width(c: fields.ConfigJson) -> int:
    """Width of the MLPs: two thirds of the entry, times a factor, rounded up to a multiple."""
    width = c.get("block_ff_dim", c["intermediate_size"])
    if not c["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    if (factor := c["block_ffn_dim_multiplier"]) is None:
        return width
    multiple = c["block_multiple_of"]
    return -(-int(factor * width) // multiple) * multiple


def layer_types(c: fields.ConfigJson) -> list[str]:
    """The kind of each layer; older files have the numbers of those of attention (full_attn_idxs).

    Raises ValueError if no layer has attention.
    """
    n_layers, attention = c["num_hidden_layers"], c.get("full_attn_idxs")
    chosen = range(n_layers) if attention is None else attention
    default = [rotary.GLOBAL if i in chosen else CONV for i in range(n_layers)]
    types = fields.read_layer_types(c, default, (CONV, rotary.GLOBAL))
    if rotary.GLOBAL not in types:
        raise ValueError(
            f"layer_types has no {rotary.GLOBAL}; a model without attention is unknown"
        )
    return types


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "lfm2", "Lfm2ForCausalLM")
    for name in ("hidden_act", "rope_theta", "rope_scaling"):
        del base[name]
    mixers = [layer.mixer for layer in cfg.layers]
    conv = next((m for m in mixers if isinstance(m, ShortConvConfig)), ShortConvConfig(1, cfg.D))
    types = [rotary.GLOBAL if isinstance(m, AttentionConfig) else CONV for m in mixers]
    return base | dict(
        norm_eps=base.pop("rms_norm_eps"),
        conv_bias=conv.bias,
        conv_L_cache=conv.conv_len,
        block_auto_adjust_ff_dim=False,
        layer_types=types,
        rope_parameters=rotary.parameters_json(fields.global_rope(cfg)),
    )
