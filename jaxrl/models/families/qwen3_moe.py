"""Qwen3 with experts (https://arxiv.org/abs/2505.09388), for example Qwen3-30B-A3B."""

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
    return fields.with_dense_layers(cfg, c)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    window = fields.largest_window(cfg)
    base = fields.base_json(cfg, "qwen3_moe", "Qwen3MoeForCausalLM")
    return (
        base
        | fields.experts_json(cfg)
        | fields.dense_layers_json(cfg)
        | dict(
            use_sliding_window=bool(window),
            sliding_window=window,
            attention_bias=cfg.attention_layers[0].qkv_bias,
            norm_topk_prob=cfg.expert_layers[0].router.norm,
        )
    )
