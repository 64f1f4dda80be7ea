"""Qwen3 with experts (https://arxiv.org/abs/2505.09388), for example Qwen3-30B-A3B."""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig, MLPConfig
from jaxrl.models.families import entries, fields, qwen2

ENTRIES = entries.Entries(
    classes=("Qwen3Moe",),
    read=entries.READ
    | entries.LATER_LEN
    | entries.WINDOWS
    | {
        *("hidden_act", "attention_bias", "use_sliding_window", "num_experts", "num_local_experts"),
        *("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
        "mlp_only_layers",
    },
    neutral=frozenset(
        {
            *("dual_chunk_attention_config", "max_window_layers", "output_router_logits"),
            "router_aux_loss_coef",
        }
    ),
    neutral_at={"use_qk_norm": (True,)},
)
DEFAULTS: dict[str, Any] = dict(num_key_value_heads=4)  # of transformers


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Layers of `mlp_only_layers`, and those that `decoder_sparse_step` skips, are dense."""
    only, step = set(c.get("mlp_only_layers") or []), c.get("decoder_sparse_step", 1)
    bias = c.get("attention_bias", False)
    cfg = fields.base_config(
        DEFAULTS | dict(c),
        "qwen3_moe",
        windows=fields.uniform_windows(c, qwen2.used_window(c)),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        E=fields.n_experts(c),
        top_k=c["num_experts_per_tok"],
        F_expert=c["moe_intermediate_size"],
        norm_topk=c.get("norm_topk_prob", False),
    )
    mlp = MLPConfig(c["intermediate_size"], cfg.expert_layers[0].act)
    layers = [
        dataclasses.replace(layer, ffn=mlp) if i in only or (i + 1) % step else layer
        for i, layer in enumerate(cfg.layers)
    ]
    return dataclasses.replace(cfg, layers=tuple(layers))


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    window, experts = fields.largest_window(cfg), cfg.expert_layers[0]
    ffns = enumerate(layer.ffn for layer in cfg.layers)
    dense = {i: ffn for i, ffn in ffns if isinstance(ffn, MLPConfig)}
    return fields.base_json(cfg, "qwen3_moe", "Qwen3MoeForCausalLM") | dict(
        use_sliding_window=bool(window),
        sliding_window=window,
        attention_bias=cfg.attention_layers[0].qkv_bias,
        num_experts=experts.E,
        num_experts_per_tok=experts.top_k,
        moe_intermediate_size=experts.F,
        norm_topk_prob=experts.norm_topk,
        decoder_sparse_step=1,
        mlp_only_layers=list(dense),
    )
