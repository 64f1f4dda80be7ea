"""Qwen3-Next, for example Qwen3-Next-80B-A3B: the predecessor of Qwen3.5 with experts.

Its gated DeltaNet has two projections in place of four, and some of its layers may be dense.
Definition: transformers' model type `qwen3_next`.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, qwen3_5, qwen3_5_moe

ENTRIES = entries.Entries(
    classes=("Qwen3Next",),
    read=qwen3_5.ENTRIES.read
    | {*qwen3_5_moe.EXPERTS, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"},
    neutral=qwen3_5.ENTRIES.neutral | qwen3_5_moe.ROUTER,
    neutral_at=qwen3_5.ENTRIES.neutral_at,
)
DEFAULTS: dict[str, Any] = qwen3_5_moe.DEFAULTS | dict(
    intermediate_size=5632, num_experts=512, num_experts_per_tok=10
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for unknown layer types, and if no layer has experts."""
    c = DEFAULTS | dict(c)
    experts = qwen3_5_moe.mixture(c, norm_topk=c.get("norm_topk_prob", True))
    cfg = qwen3_5.hybrid_config(c, "qwen3_next", fused=True, **experts)
    return fields.with_dense_layers(cfg, c)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = qwen3_5.hybrid_json(cfg, "qwen3_next", "Qwen3NextForCausalLM")
    more = fields.experts_json(cfg) | fields.dense_layers_json(cfg)
    return base | more | dict(norm_topk_prob=cfg.expert_layers[0].router.norm)
