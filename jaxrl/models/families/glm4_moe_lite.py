"""GLM-4.7-Flash: the latent attention of DeepSeek-V3 with the experts and the router of GLM-4.5.

Definition: transformers' model type `glm4_moe_lite`.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig, MLPConfig
from jaxrl.models.families import deepseek, entries, fields, glm4_moe, latent

DENSE, SPARSE = "dense", "sparse"
ENTRIES = entries.Entries(
    classes=("Glm4MoeLite",),
    read=entries.READ
    | latent.READ
    | {"hidden_act", "mlp_layer_types", *glm4_moe.DRAFTER_LAYERS, *glm4_moe.EXPERTS},
    neutral=deepseek.NEUTRAL,
    neutral_at=deepseek.ONLY,
)
DEFAULTS: dict[str, Any] = dict(  # those of transformers
    q_lora_rank=768,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    n_routed_experts=64,
    num_experts_per_tok=4,
    moe_intermediate_size=1536,
    n_shared_experts=1,
    norm_topk_prob=True,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.8,
    rms_norm_eps=1e-5,
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError if no layer has experts, and for sizes that contradict each other."""
    c = DEFAULTS | dict(c)
    cfg = latent.with_mla(glm4_moe.with_experts(c, "glm4_moe_lite"), c)
    return fields.with_dense_mlps(cfg, dense_layers(c))


def dense_layers(c: fields.ConfigJson) -> list[int]:
    """Numbers of the layers without experts: `mlp_layer_types`, or the first one.

    Raises ValueError for other types, and for a `first_k_dense_replace` with other layers.
    """
    L = c["num_hidden_layers"]
    types = c.get("mlp_layer_types") or [DENSE] + [SPARSE] * (L - 1)
    if len(types) != L or set(types) - {DENSE, SPARSE}:
        raise ValueError(
            f"mlp_layer_types has {len(types)} entries of {sorted(set(types))} for {L} layers; "
            f"write {DENSE} or {SPARSE} for each layer"
        )
    dense = [i for i, kind in enumerate(types) if kind == DENSE]
    if len(dense) == L:
        raise ValueError(
            "mlp_layer_types leaves no layer with experts; use a dense family's config"
        )
    if c.get("first_k_dense_replace", len(dense)) != len(dense):
        raise ValueError(
            f"first_k_dense_replace={c['first_k_dense_replace']} is ignored by transformers, and "
            f"mlp_layer_types (or its default) has {len(dense)} dense layers; remove it"
        )
    return dense


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "glm4_moe_lite", "Glm4MoeLiteForCausalLM")
    types = [DENSE if isinstance(layer.ffn, MLPConfig) else SPARSE for layer in cfg.layers]
    return base | glm4_moe.experts_json(cfg) | latent.mla_json(cfg) | dict(mlp_layer_types=types)
