"""Qwen1.5-MoE and Qwen2-57B-A14B (https://arxiv.org/abs/2407.10671): experts and a shared one.

Definition: transformers' model type `qwen2_moe`.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, qwen2, qwen3_5_moe

ENTRIES = entries.Entries(
    classes=("Qwen2Moe",),
    read=entries.READ
    | entries.LATER_LEN
    | entries.QWEN_WINDOWS
    | {
        *("hidden_act", "qkv_bias", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
        *qwen3_5_moe.EXPERTS,
    },
    neutral=qwen3_5_moe.ROUTER,
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=16,
    qkv_bias=True,
    num_experts=60,
    num_experts_per_tok=4,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    max_window_layers=28,
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError if no layer has experts, and without a shared one."""
    c = DEFAULTS | dict(c)
    window, last = qwen2.used_window(c), c["max_window_layers"]
    local = [window and i % 2 == 0 and i < last for i in range(c["num_hidden_layers"])]
    types = [fields.LOCAL if one else fields.GLOBAL for one in local]
    cfg = fields.base_config(
        c,
        "qwen2_moe",
        windows=fields.read_windows(c, window, types),
        qkv_bias=c["qkv_bias"],
        **qwen3_5_moe.mixture(c, norm_topk=c.get("norm_topk_prob", False)),
    )
    return fields.with_dense_layers(cfg, c)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    window = fields.largest_window(cfg)
    base = fields.base_json(cfg, "qwen2_moe", "Qwen2MoeForCausalLM")
    more = fields.experts_json(cfg) | fields.dense_layers_json(cfg)
    return (
        base
        | more
        | dict(
            qkv_bias=cfg.attention_layers[0].qkv_bias,
            norm_topk_prob=cfg.expert_layers[0].router.norm,
            use_sliding_window=bool(window),
            sliding_window=window,
            layer_types=fields.layer_types(cfg),
        )
    )
