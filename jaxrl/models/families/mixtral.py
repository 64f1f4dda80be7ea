"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral with experts whose weights sum to 1."""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import fields


def from_hf(c: fields.Json) -> DecoderConfig:
    return dataclasses.replace(
        fields.base_config({"rms_norm_eps": 1e-5} | dict(c), "mixtral", theta=1e6),
        windows=fields.read_windows(c, [fields.LOCAL] * c["num_hidden_layers"]),
        E=c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
        F_expert=c["intermediate_size"],
        norm_topk=True,
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "mixtral", "MixtralForCausalLM")
    return base | dict(
        num_local_experts=cfg.E,
        num_experts_per_tok=cfg.top_k,
        sliding_window=cfg.window(0) or None,
    )
