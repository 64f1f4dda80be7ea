"""Qwen3 with experts (https://arxiv.org/abs/2505.09388), for example Qwen3-30B-A3B."""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import fields, qwen2


def from_hf(c: fields.Json) -> DecoderConfig:
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
        fields.base_config(c, "qwen3_moe"),
        windows=qwen2.windows(c),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        E=c["num_experts"] if "num_experts" in c else c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
        F_expert=c["moe_intermediate_size"],
        norm_topk=c.get("norm_topk_prob", False),
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "qwen3_moe", "Qwen3MoeForCausalLM")
    return (
        base
        | qwen2.windows_json(cfg)
        | dict(
            attention_bias=cfg.qkv_bias,
            num_experts=cfg.E,
            num_experts_per_tok=cfg.top_k,
            moe_intermediate_size=cfg.F_expert,
            norm_topk_prob=cfg.norm_topk,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    )
