"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral with experts whose weights sum to 1."""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, rotary

ENTRIES = entries.Entries(
    classes=("Mixtral",),
    read=entries.READ
    | entries.LATER_LEN
    | entries.WINDOWS
    | {"hidden_act", "num_local_experts", "num_experts", "num_experts_per_tok"},
    neutral=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    neutral_at={"router_jitter_noise": (0,)},
)
DEFAULTS: dict[str, Any] = dict(num_key_value_heads=8, rms_norm_eps=1e-5)  # of transformers


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    c = DEFAULTS | dict(c)
    return fields.base_config(
        c,
        "mixtral",
        rope=rotary.read_rope(c, theta=1e6),
        windows=fields.uniform_windows(c, c.get("sliding_window")),
        E=fields.n_experts(c),
        top_k=c["num_experts_per_tok"],
        F_expert=c["intermediate_size"],
        norm_topk=True,
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "mixtral", "MixtralForCausalLM")
    experts = cfg.expert_layers[0]
    return base | dict(
        num_local_experts=experts.E,
        num_experts_per_tok=experts.top_k,
        sliding_window=fields.largest_window(cfg),
    )
