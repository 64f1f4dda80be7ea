"""Qwen3 with experts (https://arxiv.org/abs/2505.09388), for example Qwen3-30B-A3B."""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig
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
    """Raises ValueError for models with dense layers."""
    dense, step = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step", 1)
    if dense or step != 1:
        raise ValueError(
            f"qwen3_moe with mlp_only_layers={dense} and decoder_sparse_step={step} has dense "
            "layers among those with experts, which is not supported; use a model with experts in "
            "every layer"
        )
    bias = c.get("attention_bias", False)
    return dataclasses.replace(
        fields.base_config(DEFAULTS | dict(c), "qwen3_moe"),
        windows=fields.uniform_windows(c, qwen2.used_window(c)),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        E=fields.n_experts(c),
        top_k=c["num_experts_per_tok"],
        F_expert=c["moe_intermediate_size"],
        norm_topk=c.get("norm_topk_prob", False),
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    return fields.base_json(cfg, "qwen3_moe", "Qwen3MoeForCausalLM") | dict(
        use_sliding_window=bool(cfg.window(0)),
        sliding_window=cfg.window(0) or None,
        attention_bias=cfg.qkv_bias,
        num_experts=cfg.E,
        num_experts_per_tok=cfg.top_k,
        moe_intermediate_size=cfg.F_expert,
        norm_topk_prob=cfg.norm_topk,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
