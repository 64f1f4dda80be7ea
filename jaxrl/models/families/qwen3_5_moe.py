"""Qwen3.5 with experts, for example Qwen3.5-35B-A3B: every layer has a shared expert with a gate.

Definition: transformers' model type `qwen3_5_moe_text`.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, qwen3_5

EXPERTS = {
    "num_experts": 256,  # the defaults are those of transformers
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
ROUTER = frozenset({"output_router_logits", "router_aux_loss_coef"})
ENTRIES = entries.Entries(
    classes=("Qwen3_5Moe", "Qwen3_5MoeText"),
    read=qwen3_5.ENTRIES.read | {*EXPERTS},
    neutral=qwen3_5.ENTRIES.neutral | ROUTER,
    neutral_at={
        **qwen3_5.ENTRIES.neutral_at,
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1,),
    },
)
# The top level of an image-and-text model; its language model is in text_config.
IMAGE_ENTRIES = dataclasses.replace(qwen3_5.IMAGE_ENTRIES, classes=("Qwen3_5Moe",))
DEFAULTS: dict[str, Any] = (
    qwen3_5.DEFAULTS | EXPERTS | dict(num_key_value_heads=2, intermediate_size=0)
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for unknown layer types."""
    c = DEFAULTS | dict(c)
    return qwen3_5.hybrid_config(c, "qwen3_5_moe", **mixture(c, norm_topk=True))


def mixture(c: fields.ConfigJson, *, norm_topk: bool) -> dict[str, Any]:
    """The experts as fields of `uniform_decoder`. Raises ValueError without a shared expert."""
    if not c["shared_expert_intermediate_size"]:
        raise ValueError("shared_expert_intermediate_size is 0; set the width of the shared expert")
    names = ("E", "top_k", "F_expert", "shared_F")
    sizes = dict(zip(names, (c[name] for name in EXPERTS), strict=True))
    return sizes | dict(norm_topk=norm_topk)


def text_part(config: fields.ConfigJson) -> fields.ConfigJson:
    """`entries.language_part`."""
    return entries.language_part(config, IMAGE_ENTRIES, "qwen3_5_moe", tied=False)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = qwen3_5.hybrid_json(cfg, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")
    if not cfg.dense_F:
        del base["intermediate_size"]
    return base | fields.experts_json(cfg)
