"""GLM-4.5, GLM-4.6 and GLM-4.7 (https://arxiv.org/abs/2508.06471), and GLM-4.5-Air.

The first layers are dense. The others have a router of sigmoids with a correction, and a shared
expert. Half of every head is rotated. Definition: transformers' model type `glm4_moe`.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig, RouterConfig
from jaxrl.models.families import entries, fields, rotary

# Number of layers of the drafter, whose tensors an export keeps (files/weight_files.py).
DRAFTER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 128,  # the defaults are those of transformers
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
}
ENTRIES = entries.Entries(
    classes=("Glm4Moe",),
    read=entries.READ | {"hidden_act", "attention_bias", "use_qk_norm", *DRAFTER_LAYERS, *EXPERTS},
    neutral=frozenset({"output_router_logits"}),
)
DEFAULTS: dict[str, Any] = EXPERTS | dict(
    num_key_value_heads=8, rms_norm_eps=1e-5, partial_rotary_factor=0.5
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError if no layer has experts."""
    c = DEFAULTS | dict(c)
    cfg = with_experts(
        c,
        "glm4_moe",
        rope=rotary.read_rope(c, partial=True, neutral=rotary.MROPE),
        qkv_bias=c.get("attention_bias", False),
        qk_norm=c.get("use_qk_norm", False),
    )
    return fields.with_dense_prefix(cfg, c["first_k_dense_replace"])


def with_experts(c: fields.ConfigJson, family: str, **more: Any) -> DecoderConfig:
    """The decoder whose layers all have the experts and the router of the config.

    `more` are further fields of `base_config`.
    """
    cfg = fields.base_config(
        c,
        family,
        E=c["n_routed_experts"],
        top_k=c["num_experts_per_tok"],
        F_expert=c["moe_intermediate_size"],
        shared_F=c["moe_intermediate_size"] * c["n_shared_experts"],
        **more,
    )
    router = RouterConfig(
        c["num_experts_per_tok"],
        score="sigmoid",
        norm=c["norm_topk_prob"],
        correction=True,
        n_groups=c["n_group"],
        top_groups=c["topk_group"],
        scale=float(c["routed_scaling_factor"]),
    )
    experts = dataclasses.replace(cfg.expert_layers[0], router=router, shared_gate=False)
    layers = tuple(dataclasses.replace(layer, ffn=experts) for layer in cfg.layers)
    return dataclasses.replace(cfg, layers=layers)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    attention = cfg.attention_layers[0]
    base = fields.base_json(cfg, "glm4_moe", "Glm4MoeForCausalLM") | experts_json(cfg)
    return base | dict(
        partial_rotary_factor=attention.rope.rotary,
        attention_bias=attention.qkv_bias,
        use_qk_norm=attention.qk_norm,
        first_k_dense_replace=cfg.L - len(cfg.expert_layers),
    )


def experts_json(cfg: DecoderConfig) -> dict[str, Any]:
    """The inverse of `with_experts`; without a drafter."""
    experts = cfg.expert_layers[0]
    router = experts.router
    return dict(
        n_routed_experts=experts.E,
        num_experts_per_tok=router.top_k,
        moe_intermediate_size=experts.F,
        n_shared_experts=experts.shared_F // experts.F,
        norm_topk_prob=router.norm,
        n_group=router.n_groups,
        topk_group=router.top_groups,
        routed_scaling_factor=router.scale,
        num_nextn_predict_layers=0,
    )
