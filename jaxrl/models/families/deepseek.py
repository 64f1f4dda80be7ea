"""DeepSeek-V3 and V3.1 (https://arxiv.org/abs/2412.19437), Moonlight and Kimi-K2.

Multi-head latent attention; the experts and the router of GLM-4.5, after dense layers. Definition:
transformers' model type `deepseek_v3`; Kimi-K2 has the type `kimi_k2` and the same classes.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, glm4_moe, latent

CODE = frozenset({f"modeling_deepseek.DeepseekV3{name}" for name in ("Model", "ForCausalLM")})
# Entries of published files; transformers ignores them, and has these values.
ONLY: dict[str, tuple[Any, ...]] = dict(
    scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,)
)
NEUTRAL = frozenset({"output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size"})
ENTRIES = entries.Entries(
    classes=("DeepseekV3",),
    read=entries.READ | latent.READ | {"hidden_act", *glm4_moe.DRAFTER_LAYERS, *glm4_moe.EXPERTS},
    neutral=NEUTRAL,
    neutral_at=ONLY,
    code=CODE,
)
DEFAULTS: dict[str, Any] = dict(  # those of transformers
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    norm_topk_prob=True,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError if no layer has experts, and for sizes that contradict each other."""
    c = DEFAULTS | dict(c)
    cfg = latent.with_mla(glm4_moe.with_experts(c, "deepseek_v3"), c)
    return fields.with_dense_prefix(cfg, c["first_k_dense_replace"])


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "deepseek_v3", "DeepseekV3ForCausalLM")
    return (
        base
        | glm4_moe.experts_json(cfg)
        | latent.mla_json(cfg)
        | dict(first_k_dense_replace=cfg.L - len(cfg.expert_layers))
    )
