"""gpt-oss-20b and gpt-oss-120b (https://arxiv.org/abs/2508.10925).

Every layer has experts with biases and a clamped gate, and attention with a sink for each head.
Layers with a window of 128 tokens and layers without one alternate. Definition: transformers' model
type `gpt_oss`.
"""

import dataclasses
from typing import Any

from jaxrl.models.config import AttentionConfig, ClampedGLU, DecoderConfig, LayerConfig
from jaxrl.models.families import entries, fields, rotary

ENTRIES = entries.Entries(
    classes=("GptOss",),
    read=entries.READ
    | entries.LATER_LEN
    | entries.WINDOWS
    | {
        *("attention_bias", "num_local_experts", "num_experts", "num_experts_per_tok"),
        *("swiglu_limit", "swiglu_alpha"),
    },
    # The router's loss is config.algorithm's; experts_per_token and initial_context_length repeat
    # num_experts_per_tok and the entry of rope_scaling in published files, and no code reads them.
    neutral=frozenset(
        {
            *("output_router_logits", "router_aux_loss_coef", "experts_per_token"),
            "initial_context_length",
        }
    ),
    neutral_at={"hidden_act": ("silu",)},
)
YARN = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)
DEFAULTS: dict[str, Any] = dict(  # of transformers
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    attention_bias=True,
    sliding_window=128,
    num_experts_per_tok=4,
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for unknown layer types."""
    c = DEFAULTS | dict(c)
    if not (c.get("rope_parameters") or c.get("rope_scaling")):
        c["rope_parameters"] = YARN
    if not {"num_experts", "num_local_experts"} & c.keys():
        c["num_local_experts"] = 128
    windows = [rotary.GLOBAL if i % 2 else rotary.LOCAL for i in range(c["num_hidden_layers"])]
    cfg = fields.base_config(
        c,
        "gpt_oss",
        rope=rotary.read_rope(c, theta=150_000.0),
        windows=fields.read_windows(c, c["sliding_window"], windows),
        qkv_bias=c["attention_bias"],
        o_bias=c["attention_bias"],
        E=fields.n_experts(c),
        top_k=c["num_experts_per_tok"],
        F_expert=c["intermediate_size"],
    )
    act = ClampedGLU(float(c.get("swiglu_limit", 7.0)), float(c.get("swiglu_alpha", 1.702)))
    experts = dataclasses.replace(cfg.expert_layers[0], act=act, bias=True)

    def with_sinks(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.mixer, AttentionConfig)
        return dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.mixer, sinks=True), ffn=experts
        )

    return dataclasses.replace(cfg, layers=tuple(map(with_sinks, cfg.layers)))


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    attention, experts = cfg.attention_layers[0], cfg.expert_layers[0]
    assert isinstance(experts.act, ClampedGLU)
    silu = dataclasses.replace(experts, act="silu")  # the entry hidden_act, which has no effect
    first = dataclasses.replace(cfg.layers[0], ffn=silu)
    base = fields.base_json(
        dataclasses.replace(cfg, layers=(first, *cfg.layers[1:])), "gpt_oss", "GptOssForCausalLM"
    )
    for name in ("rope_theta", "rope_scaling"):  # without rope_parameters, transformers takes YaRN
        del base[name]
    return base | dict(
        rope_parameters=rotary.parameters_json(attention.rope),
        attention_bias=attention.qkv_bias,
        num_local_experts=experts.E,
        num_experts_per_tok=experts.top_k,
        sliding_window=fields.largest_window(cfg),
        layer_types=fields.layer_types(cfg),
        swiglu_limit=experts.act.limit,
        swiglu_alpha=experts.act.alpha,
    )
