"""Writes config.json files drawn for every family, and the logits of transformers' torch models.

tests/models/golden_configs/configs.json has a list of {name, seed, config, may_refuse}: a config
with every field that changes numbers at a value that is drawn with a seed. may_refuse names the
fields with a value that jaxrl need not support, of which an error must name one. logits.npz has
float32 [positions, vocabulary] by name. The weights are those of scripts/seeded_weights.py.

torch is not a dependency of the project; run this in a separate environment:
    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors numpy
    /tmp/torch/bin/python scripts/make_golden_configs.py tests/models [FAMILY ...]
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  only in that environment
import transformers
from safetensors.numpy import load_file, save_file
from seeded_weights import seeded_tensor, seeded_tokens

Json = dict[str, Any]
LENGTH, SHOWN = 24, [6, 14, 23]  # tokens of the row, positions whose logits are kept
SHAPE = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
MIXED = ["full_attention", "sliding_attention", "full_attention"]
LINEAR = ["linear_attention"] * 3
LOCAL, FULL = ["sliding_attention"] * 3, ["full_attention"] * 3


class May(dict):
    """Entries that jaxrl may refuse, with an error that names one of them."""


def yarn(**more: Any) -> Json:
    return dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16) | more


LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
DEFAULT = dict(rope_type="default")
ROPES: list[Json] = [
    {},
    dict(rope_theta=300.0),
    dict(rope_theta=300.0, rope_scaling=dict(type="linear", factor=3.0)),
    dict(rope_parameters=DEFAULT | dict(rope_theta=200.0)),
    dict(rope_parameters=dict(rope_type="linear", rope_theta=200.0, factor=2.5), rope_theta=9.0),
    dict(rope_parameters=dict(rope_type="linear", factor=2.5), rope_theta=300.0),
    dict(rope_scaling=dict(rope_type="dynamic", factor=2.0), rope_theta=300.0),
    dict(rope_scaling=yarn(), rope_theta=300.0),
    dict(rope_parameters=yarn(rope_theta=300.0, attention_factor=0.8, beta_fast=8.0)),
    dict(rope_parameters=yarn(rope_theta=300.0, mscale=1.0, mscale_all_dim=0.7, beta_slow=2.0)),
    dict(rope_scaling=yarn(truncate=False, beta_fast=4.0, beta_slow=1.5), rope_theta=100.0),
    dict(rope_scaling=dict(rope_type="yarn", factor=2.0), rope_theta=300.0),
    dict(rope_scaling=yarn(), rope_theta=300.0, original_max_position_embeddings=48),
    dict(rope_scaling=LLAMA3 | dict(original_max_position_embeddings=16), rope_theta=300.0),
    dict(rope_parameters=LLAMA3 | dict(rope_theta=300.0)),
    dict(rope_scaling=LLAMA3, rope_theta=300.0, original_max_position_embeddings=24),
    dict(rope_scaling=yarn(rope_theta=80.0), rope_parameters=DEFAULT | dict(rope_theta=500.0)),
    dict(
        rope_scaling=dict(rope_type="linear", factor=2.0),
        rope_parameters=yarn(rope_theta=300.0),
        rope_theta=300.0,
    ),
    May(rope_scaling=yarn(), rope_parameters=DEFAULT | dict(rope_theta=500.0)),
    May(rope_scaling=yarn(), rope_parameters=DEFAULT | dict(rope_theta=500.0), rope_theta=300.0),
    May(rope_theta=300.0, partial_rotary_factor=0.5),
    May(
        rope_scaling=dict(
            rope_type="longrope",
            factor=4.0,
            short_factor=[1.5] * 4,
            long_factor=[3.0] * 4,
            original_max_position_embeddings=16,
        )
    ),
    May(
        rope_parameters=dict(rope_type="proportional", rope_theta=100.0, partial_rotary_factor=0.5)
    ),
    May(rope_parameters=dict(full_attention=dict(rope_type="linear", factor=3.0))),
]


def by_type(full: Json, local: Json | None) -> Json:
    return dict(full_attention=full, sliding_attention=local)


GEMMA3_ROPES: list[Json] = [
    {},
    dict(rope_theta=300.0, rope_local_base_freq=50.0),
    dict(rope_theta=300.0, rope_scaling=dict(rope_type="linear", factor=3.0)),
    dict(rope_parameters=by_type(dict(rope_type="linear", factor=2.0), dict(rope_theta=30.0))),
    dict(rope_parameters=by_type(DEFAULT, dict(rope_type="linear", factor=4.0)), rope_theta=90.0),
    dict(rope_parameters=by_type(yarn(rope_theta=300.0), None), rope_local_base_freq=70.0),
    dict(rope_parameters=by_type(DEFAULT | dict(rope_theta=200.0), LLAMA3 | dict(rope_theta=60.0))),
    dict(rope_parameters=by_type(dict(type="linear", factor=2.0), yarn(rope_theta=60.0))),
    dict(
        rope_parameters=by_type(DEFAULT | dict(rope_theta=200.0), DEFAULT),
        rope_scaling=dict(rope_type="linear", factor=3.0),
    ),
    dict(rope_parameters=by_type(yarn(rope_theta=200.0), DEFAULT), rope_scaling=dict(factor=2.0)),
    May(rope_scaling=dict(type="linear", factor=3.0)),
    May(rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=200.0)),
    May(rope_parameters=by_type(yarn(truncate=False, rope_theta=90.0), DEFAULT)),
    May(
        rope_parameters=by_type(yarn(rope_theta=300.0), DEFAULT),
        original_max_position_embeddings=48,
    ),
]
MROPE = dict(mrope_section=[2, 1, 1], mrope_interleaved=True)
QWEN3_5_ROPES: list[Json] = [
    {},
    dict(rope_theta=300.0),
    dict(rope_theta=300.0, partial_rotary_factor=0.5),
    dict(rope_parameters=DEFAULT | dict(rope_theta=200.0)),
    dict(rope_parameters=DEFAULT | MROPE | dict(rope_theta=200.0, partial_rotary_factor=0.5)),
    dict(rope_parameters=DEFAULT | dict(rope_theta=200.0, partial_rotary_factor=1.0)),
    dict(rope_parameters=yarn(rope_theta=300.0, partial_rotary_factor=0.5)),
    dict(rope_scaling=dict(rope_type="linear", factor=3.0), rope_theta=300.0),
    May(rope_parameters=DEFAULT | dict(rope_theta=200.0), partial_rotary_factor=0.5),
    May(rope_scaling=yarn(), rope_theta=300.0),
]
LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    moe_intermediate_size=20,
)
LATENT_ROPES: list[Json] = [
    {},
    dict(rope_theta=300.0),
    dict(rope_scaling=yarn(mscale=1.0, mscale_all_dim=1.0, beta_slow=2.0), rope_theta=300.0),
    dict(rope_parameters=yarn(rope_theta=300.0, mscale=1.0, mscale_all_dim=0.7)),
    dict(rope_scaling=yarn(mscale_all_dim=0.7, attention_factor=0.8), rope_theta=300.0),
    dict(rope_scaling=yarn(), rope_theta=300.0),
]
EPS = [{}, dict(rms_norm_eps=1e-5), dict(rms_norm_eps=0.05)]
TIED = [{}, dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)]
HEADS = [{}, dict(head_dim=16), dict(num_key_value_heads=1), dict(num_key_value_heads=4)]
BIAS = [{}, dict(attention_bias=True), dict(attention_bias=False)]
ACTS = [
    {},
    dict(hidden_act="silu"),
    dict(hidden_act="swish"),
    dict(hidden_act="gelu_pytorch_tanh"),
    dict(hidden_act="gelu_new"),
    May(hidden_act="gelu"),
    May(hidden_act="relu"),
]
NOTES = [
    {},
    dict(pretraining_tp=1, attention_dropout=0.0, initializer_range=0.02, use_cache=False),
    dict(torch_dtype="bfloat16", _name_or_path="x", transformers_version="4.40.0", top_p=0.9),
    dict(dtype="float32", id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, unknown_flag=False),
]
COMMON = [ROPES, EPS, TIED, HEADS, ACTS, NOTES]
ONE_WINDOW = [{}, dict(sliding_window=None), dict(sliding_window=5), dict(sliding_window=9)]
QWEN_WINDOWS = [
    {},
    dict(use_sliding_window=False, sliding_window=5),
    dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    dict(use_sliding_window=True, sliding_window=6, max_window_layers=0),
    dict(use_sliding_window=True, sliding_window=6),
    dict(use_sliding_window=True, sliding_window=5, layer_types=MIXED, max_window_layers=3),
    dict(use_sliding_window=True, sliding_window=None),
    May(use_sliding_window=False, sliding_window=5, layer_types=MIXED),
]
EXPERTS = [dict(num_experts_per_tok=1), dict(num_experts_per_tok=2), dict(num_experts_per_tok=3)]
GEMMA_ACTS = [
    {},
    dict(hidden_act="gelu", hidden_activation="gelu_pytorch_tanh"),
    dict(hidden_activation="gelu_new"),
    dict(hidden_activation="silu"),
    dict(hidden_act="silu"),
    May(hidden_activation="gelu"),
]
GEMMA = [
    EPS,
    TIED,
    BIAS,
    GEMMA_ACTS,
    [dict(num_key_value_heads=1), dict(num_key_value_heads=4), {}],
    [dict(head_dim=8), dict(head_dim=16)],
    [dict(query_pre_attn_scalar=8), dict(query_pre_attn_scalar=24), {}],
]
CAPS = [dict(attn_logit_softcapping=2.0), dict(attn_logit_softcapping=None), {}]
FINAL_CAPS = [dict(final_logit_softcapping=3.0), dict(final_logit_softcapping=None), {}]
HYBRID_SHAPE = dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
HYBRID: list[list[Json]] = [
    QWEN3_5_ROPES,
    *(EPS, TIED, NOTES, BIAS),
    [{}, dict(hidden_act="silu"), dict(hidden_act="swish"), May(hidden_act="gelu_new")],
    [{}, dict(num_key_value_heads=1), dict(num_key_value_heads=4)],
    [{}, dict(linear_num_value_heads=2), dict(linear_num_key_heads=1)],
    [{}, dict(linear_key_head_dim=4), dict(linear_value_head_dim=12)],
    [{}, dict(linear_conv_kernel_dim=2), dict(linear_conv_kernel_dim=5)],
    [
        dict(full_attention_interval=2),
        dict(full_attention_interval=3),
        dict(layer_types=["full_attention", "linear_attention", "full_attention"]),
        dict(layer_types=["linear_attention", "linear_attention", "full_attention"]),
        dict(layer_types=FULL),
        May(layer_types=LINEAR),
        May(layer_types=MIXED, sliding_window=5),
    ],
]
MIXTURE_SHAPE = dict(moe_intermediate_size=20, num_experts=4, shared_expert_intermediate_size=12)
MIXTURE = [
    EXPERTS,
    [{}, dict(num_experts=3)],
    [{}, dict(shared_expert_intermediate_size=28)],
    [{}, dict(router_aux_loss_coef=0.5, output_router_logits=False)],
]
FEW_ROPES: list[Json] = [
    {},
    dict(rope_theta=300.0),
    dict(rope_theta=300.0, rope_scaling=dict(type="linear", factor=3.0)),
    dict(rope_parameters=DEFAULT | dict(rope_theta=200.0)),
    dict(rope_scaling=dict(rope_type="dynamic", factor=2.0), rope_theta=300.0),
    dict(rope_scaling=yarn(), rope_theta=300.0),
    dict(rope_parameters=LLAMA3 | dict(rope_theta=300.0, original_max_position_embeddings=16)),
    May(rope_theta=300.0, partial_rotary_factor=0.5),
    May(
        rope_parameters=dict(rope_type="proportional", rope_theta=100.0, partial_rotary_factor=0.5)
    ),
]
OLMO3_ROPES: list[Json] = [
    {},
    dict(rope_theta=300.0),
    dict(rope_theta=300.0, rope_scaling=yarn()),
    dict(rope_parameters=by_type(yarn(rope_theta=300.0), None)),
    dict(rope_parameters=by_type(DEFAULT | dict(rope_theta=200.0), DEFAULT)),
    dict(rope_parameters=by_type(DEFAULT, dict(rope_type="linear", factor=4.0, rope_theta=50.0))),
    dict(rope_parameters=by_type(LLAMA3 | dict(rope_theta=300.0), DEFAULT), rope_theta=90.0),
    May(rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=200.0)),
    May(rope_scaling=dict(type="linear", factor=3.0)),
    May(rope_theta=300.0, partial_rotary_factor=0.5),
]


def long_rope(n_pairs: int, **more: Any) -> Json:
    lists = dict(short_factor=[1.0 + i for i in range(n_pairs)], long_factor=[9.0] * n_pairs)
    return dict(type="longrope") | lists | more


PHI3_ROPES: list[Json] = [
    {},
    dict(rope_theta=300.0),
    dict(rope_theta=300.0, partial_rotary_factor=0.5),
    dict(rope_scaling=long_rope(4), original_max_position_embeddings=32, rope_theta=300.0),
    dict(
        rope_scaling=long_rope(2, attention_factor=0.8),
        original_max_position_embeddings=48,
        partial_rotary_factor=0.5,
    ),
    May(rope_scaling=long_rope(4) | dict(type="su"), original_max_position_embeddings=32),
    dict(
        rope_parameters=long_rope(2, rope_theta=200.0, factor=4.0, partial_rotary_factor=0.5),
        original_max_position_embeddings=32,
    ),
    dict(rope_scaling=long_rope(4, original_max_position_embeddings=32)),
    May(rope_scaling=dict(type="linear", factor=3.0)),
    May(rope_scaling=long_rope(3)),
]
GLM4_ROPES: list[Json] = [
    {},
    dict(rope_theta=300.0),
    dict(rope_theta=300.0, partial_rotary_factor=1.0),
    dict(rope_parameters=DEFAULT | dict(rope_theta=200.0, partial_rotary_factor=0.25)),
    dict(rope_scaling=yarn(), rope_theta=300.0, partial_rotary_factor=0.5),
    May(rope_parameters=DEFAULT | dict(rope_theta=200.0)),
    May(rope_parameters=DEFAULT | MROPE | dict(rope_theta=200.0)),
]
GROWING = yarn(rope_theta=300.0, llama_4_scaling_beta=0.3)
MINISTRAL3_ROPES: list[Json] = [
    {},
    dict(rope_parameters=GROWING),
    dict(rope_parameters=GROWING | dict(original_max_position_embeddings=5)),
    dict(rope_parameters=GROWING | dict(llama_4_scaling_beta=1.0, max_position_embeddings=64)),
    dict(rope_parameters=GROWING | dict(mscale=1.0, mscale_all_dim=0.5)),
    dict(
        rope_parameters=DEFAULT
        | dict(rope_theta=200.0, llama_4_scaling_beta=0.2, original_max_position_embeddings=9)
    ),
    May(rope_parameters=yarn(rope_theta=300.0)),
    May(rope_scaling=yarn(llama_4_scaling_beta=0.2)),
]
NO_HEAD_DIM = [{}, dict(num_key_value_heads=1), dict(num_key_value_heads=4)]
TYPES = [
    {},
    dict(layer_types=MIXED),
    dict(layer_types=FULL),
    dict(layer_types=LOCAL),
    dict(sliding_window=9),
]
PAD = dict(pad_token_id=0)  # the default of some families is outside of the vocabulary
NEW = [FEW_ROPES, EPS, TIED, HEADS, ACTS, NOTES]
FAMILIES: dict[str, tuple[Json, Sequence[Sequence[Json]]]] = {
    "llama": (
        {},
        [
            *COMMON,
            BIAS,
            [{}, dict(mlp_bias=True)],
            [{}, dict(layer_types=FULL), May(layer_types=MIXED, sliding_window=5)],
            [{}, dict(sliding_window=None), May(sliding_window=5)],
        ],
    ),
    "mistral": (
        {},
        [
            *COMMON,
            [
                *ONE_WINDOW,
                dict(sliding_window=6, layer_types=MIXED, head_dim=8),
                dict(sliding_window=6, layer_types=FULL, head_dim=8),
                dict(sliding_window=5, use_sliding_window=False),
            ],
            [{}, dict(attention_bias=False), May(attention_bias=True)],
        ],
    ),
    "mixtral": (
        dict(head_dim=8),  # transformers needs it for yarn and dynamic
        [
            *COMMON,
            EXPERTS,
            [dict(num_local_experts=4), dict(num_experts=3)],
            [
                *ONE_WINDOW,
                dict(sliding_window=5, layer_types=LOCAL),
                May(sliding_window=5, layer_types=MIXED),
            ],
            [{}, dict(router_aux_loss_coef=0.5, output_router_logits=False)],
        ],
    ),
    "qwen2": ({}, [*COMMON, BIAS, QWEN_WINDOWS]),
    "qwen3": (dict(head_dim=8), [*COMMON, BIAS, QWEN_WINDOWS]),
    "qwen3_moe": (
        dict(moe_intermediate_size=20),
        [
            *COMMON,
            BIAS,
            EXPERTS,
            [
                {},
                dict(use_sliding_window=False, sliding_window=5),
                dict(use_sliding_window=True, sliding_window=5),
                dict(use_sliding_window=True, sliding_window=5, max_window_layers=2),
                dict(use_sliding_window=True, sliding_window=None),
                May(use_sliding_window=True, sliding_window=5, layer_types=MIXED),
            ],
            [dict(num_experts=4), dict(num_local_experts=3)],
            [{}, dict(norm_topk_prob=True), dict(norm_topk_prob=False)],
            [{}, dict(decoder_sparse_step=1), May(decoder_sparse_step=2)],
            [{}, dict(mlp_only_layers=[]), May(mlp_only_layers=[1])],
        ],
    ),
    "gemma2": (
        dict(sliding_window=5),
        [
            ROPES,
            *GEMMA,
            CAPS,
            FINAL_CAPS,
            [{}, dict(sliding_window=9), dict(layer_types=MIXED), dict(layer_types=FULL)],
        ],
    ),
    "gemma3_text": (
        dict(sliding_window=5),
        [
            GEMMA3_ROPES,
            *GEMMA,
            FINAL_CAPS,
            [{}, dict(attn_logit_softcapping=None), May(attn_logit_softcapping=2.0)],
            [
                dict(sliding_window_pattern=2),
                dict(sliding_window_pattern=3),
                dict(layer_types=MIXED, sliding_window_pattern=2),
                dict(layer_types=MIXED),
            ],
        ],
    ),
    "qwen3_5_text": (HYBRID_SHAPE, HYBRID),
    "qwen3_5_moe_text": (HYBRID_SHAPE | MIXTURE_SHAPE, [*HYBRID, *MIXTURE]),
    "qwen3_next": (
        HYBRID_SHAPE | MIXTURE_SHAPE,
        [
            *HYBRID,
            *MIXTURE,
            [{}, dict(norm_topk_prob=True), dict(norm_topk_prob=False)],
            [{}, dict(decoder_sparse_step=1), dict(decoder_sparse_step=2)],
            [{}, dict(mlp_only_layers=[]), dict(mlp_only_layers=[2]), dict(mlp_only_layers=[0])],
        ],
    ),
    "olmo2": ({}, [*NEW, BIAS, [{}, May(layer_types=MIXED)]]),
    "olmo3": (dict(sliding_window=5), [OLMO3_ROPES, EPS, TIED, NO_HEAD_DIM, ACTS, BIAS, TYPES]),
    "phi3": (
        PAD,
        [PHI3_ROPES, EPS, TIED, NO_HEAD_DIM, ACTS, NOTES, ONE_WINDOW, [{}, dict(embd_pdrop=0.1)]],
    ),
    "glm4": (dict(head_dim=8) | PAD, [GLM4_ROPES, EPS, TIED, HEADS, ACTS, NOTES, BIAS]),
    "smollm3": (
        PAD,
        [
            *NEW,
            BIAS,
            [{}, dict(mlp_bias=True)],
            [{}, dict(no_rope_layers=[0, 1, 1]), dict(no_rope_layer_interval=2)],
            [
                {},
                dict(use_sliding_window=True, sliding_window=5),
                dict(use_sliding_window=True, sliding_window=5, layer_types=MIXED),
                dict(use_sliding_window=False, sliding_window=5, layer_types=FULL),
                May(use_sliding_window=False, sliding_window=5, layer_types=MIXED),
            ],
        ],
    ),
    "granite": (
        {},
        [
            *NEW,
            BIAS,
            [{}, dict(mlp_bias=True)],
            [dict(attention_multiplier=0.2), dict(attention_multiplier=1), {}],
            [{}, dict(embedding_multiplier=12), dict(embedding_multiplier=0.5)],
            [{}, dict(residual_multiplier=0.22), dict(residual_multiplier=2.0)],
            [{}, dict(logits_scaling=0.5), dict(logits_scaling=3)],
        ],
    ),
    "gemma": (
        dict(head_dim=8),
        [
            *(FEW_ROPES, EPS, TIED, HEADS, NOTES, BIAS),
            [{}, dict(hidden_act="gelu"), dict(hidden_act="silu"), dict(hidden_activation="x")],
            [{}, May(use_bidirectional_attention=True)],
        ],
    ),
    "seed_oss": (
        dict(head_dim=8),
        [
            *NEW,
            BIAS,
            [{}, dict(attention_out_bias=True), dict(mlp_bias=True)],
            [{}, dict(attention_dropout=0.1, residual_dropout=0.1)],
        ],
    ),
    "ministral3": (
        dict(head_dim=8),
        [MINISTRAL3_ROPES, EPS, TIED, HEADS, ACTS, NOTES, ONE_WINDOW],
    ),
    "cohere2": (
        dict(sliding_window=5),
        [
            *(FEW_ROPES, TIED, NO_HEAD_DIM, ACTS, BIAS),
            [{}, dict(layer_norm_eps=0.05)],
            [{}, dict(logit_scale=0.4), dict(logit_scale=2.0)],
            [*TYPES, dict(sliding_window_pattern=2), May(head_dim=16)],
        ],
    ),
    "qwen2_moe": (
        MIXTURE_SHAPE,
        [
            *(FEW_ROPES, EPS, TIED, ACTS, NOTES, EXPERTS),
            NO_HEAD_DIM,
            [{}, dict(qkv_bias=False)],
            [{}, dict(norm_topk_prob=True), dict(norm_topk_prob=False)],
            [{}, dict(decoder_sparse_step=2), dict(mlp_only_layers=[2])],
            [
                {},
                dict(use_sliding_window=False, sliding_window=5),
                dict(use_sliding_window=True, sliding_window=5),
                dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
                dict(use_sliding_window=True, sliding_window=5, layer_types=MIXED),
            ],
        ],
    ),
    "exaone4": (
        dict(sliding_window=5),
        [
            *(FEW_ROPES, EPS, TIED, HEADS, ACTS, NOTES),
            [
                *TYPES,
                dict(sliding_window_pattern=2),
                dict(sliding_window_pattern="LLG", layer_types=MIXED),
                dict(sliding_window=None, layer_types=FULL),
            ],
        ],
    ),
    "starcoder2": (
        {},
        [
            *(FEW_ROPES, TIED, NO_HEAD_DIM, ACTS, NOTES, ONE_WINDOW),
            [{}, dict(norm_epsilon=0.05)],
            [{}, dict(use_bias=False)],
            [{}, dict(attention_dropout=0.1, residual_dropout=0.1, embedding_dropout=0.1)],
        ],
    ),
    "lfm2": (
        {},
        [
            *(FEW_ROPES, TIED, NO_HEAD_DIM, NOTES),
            [{}, dict(norm_eps=0.05)],
            [{}, dict(conv_bias=True), dict(conv_L_cache=4)],
            [
                dict(layer_types=["conv", "full_attention", "conv"]),
                dict(full_attn_idxs=[0, 2]),
                dict(full_attn_idxs=[1], tie_embedding=False),
            ],
            [
                dict(block_multiple_of=8),
                dict(block_multiple_of=4, block_ffn_dim_multiplier=1.4),
                dict(block_auto_adjust_ff_dim=False),
                dict(block_ff_dim=52, block_multiple_of=12),
            ],
            [{}, May(hidden_act="gelu"), May(theta=300.0)],
        ],
    ),
    "glm4_moe": (
        dict(moe_intermediate_size=20),
        [
            [{}, dict(rope_parameters=yarn(rope_theta=300.0)), *QWEN3_5_ROPES],
            *(EPS, TIED, NOTES, BIAS, ACTS, EXPERTS),
            [dict(num_key_value_heads=1), dict(num_key_value_heads=4, head_dim=16)],
            [dict(n_routed_experts=6), dict(n_routed_experts=12)],
            [{}, dict(n_group=2, topk_group=1), dict(n_group=3, topk_group=2), dict(n_group=2)],
            [{}, dict(n_shared_experts=2)],
            [{}, dict(norm_topk_prob=True), dict(norm_topk_prob=False)],
            [{}, dict(routed_scaling_factor=2.5), dict(routed_scaling_factor=1.0)],
            [{}, dict(use_qk_norm=True), dict(use_qk_norm=False)],
            [{}, dict(first_k_dense_replace=0), dict(first_k_dense_replace=2)],
            [{}, dict(num_nextn_predict_layers=0), May(sliding_window=5)],
        ],
    ),
    "gpt_oss": (
        dict(head_dim=8),
        [
            *(ROPES, EPS, TIED, HEADS, NOTES, BIAS, EXPERTS),
            [{}, dict(hidden_act="silu"), May(hidden_act="gelu_new")],
            [dict(num_local_experts=4), dict(num_experts=3)],
            [{}, dict(swiglu_limit=0.5), dict(swiglu_limit=2.0, swiglu_alpha=1.0)],
            [
                *({}, dict(sliding_window=5), dict(sliding_window=5, layer_types=MIXED)),
                *(dict(sliding_window=9, layer_types=LOCAL), dict(layer_types=FULL)),
                May(sliding_window=None),
            ],
            [{}, dict(router_aux_loss_coef=0.5, output_router_logits=False)],
        ],
    ),
    "deepseek_v3": (
        LATENT,
        [
            *(LATENT_ROPES, EPS, TIED, NOTES, BIAS, ACTS, EXPERTS),
            [dict(q_lora_rank=None), dict(q_lora_rank=24)],
            [dict(v_head_dim=16), dict(v_head_dim=24), dict(qk_rope_head_dim=16)],
            [dict(kv_lora_rank=16), dict(kv_lora_rank=20)],
            [{}, dict(rope_interleave=True), dict(rope_interleave=False)],
            [dict(n_routed_experts=6), dict(n_routed_experts=12)],
            [dict(n_group=1, topk_group=1), dict(n_group=3, topk_group=2)],
            [{}, dict(n_shared_experts=2)],
            [{}, dict(norm_topk_prob=True), dict(norm_topk_prob=False)],
            [{}, dict(routed_scaling_factor=1.0)],
            [dict(first_k_dense_replace=0), dict(first_k_dense_replace=2)],
            [{}, dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)],
            [{}, dict(num_key_value_heads=None), May(sliding_window=5)],
        ],
    ),
    "glm4_moe_lite": (
        LATENT,
        [
            *(LATENT_ROPES, EPS, TIED, NOTES, BIAS, ACTS, EXPERTS),
            [dict(q_lora_rank=None), dict(q_lora_rank=24)],
            [dict(v_head_dim=16), dict(v_head_dim=24), dict(qk_rope_head_dim=16)],
            [{}, dict(rope_interleave=True), dict(rope_interleave=False)],
            [dict(n_routed_experts=6), dict(n_routed_experts=12)],
            [{}, dict(n_group=3, topk_group=2)],
            [{}, dict(n_shared_experts=2)],
            [{}, dict(routed_scaling_factor=1.0)],
            [
                {},
                dict(first_k_dense_replace=1),
                dict(mlp_layer_types=["sparse", "dense", "sparse"]),
                May(first_k_dense_replace=2),
            ],
            [{}, dict(num_nextn_predict_layers=0), May(sliding_window=5)],
        ],
    ),
}


def draws(seed: int, fields: Sequence[Sequence[Json]]) -> Iterator[tuple[Json, list[str]]]:
    """(entries, those that may be refused), until every option of every field is drawn.

    The first draws have only options that jaxrl supports, each further one has one that it need
    not support.
    """
    rng = np.random.default_rng(seed)
    supported = [[option for option in field if not isinstance(option, May)] for field in fields]

    def order(n_options: int) -> Iterator[int]:
        """Each option once, in a random order, again and again."""
        while True:
            yield from rng.permutation(n_options)

    orders = [order(len(options)) for options in supported]

    def draw() -> list[Json]:
        return [options[next(turn)] for options, turn in zip(supported, orders, strict=True)]

    n = max(map(len, supported))
    for _ in range(n):
        yield merged(draw()), []
    others = [
        (at, option)
        for at, field in enumerate(fields)
        for option in field
        if isinstance(option, May)
    ]
    for at, option in others:
        drawn = draw()
        yield merged(drawn[:at] + drawn[at + 1 :] + [option]), list(option)


def merged(parts: Sequence[Json]) -> Json:
    return {name: value for part in parts for name, value in part.items()}


def logits(config: Json, seed: int) -> np.ndarray:
    """float32 [positions, vocabulary] of transformers' model with the seeded weights."""
    tokens = torch.from_numpy(seeded_tokens(seed, LENGTH, config["vocab_size"])).long()
    auto = transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as place:
        folder, plain = Path(place, "folder"), Path(place, "plain")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        model = auto.from_config(transformers.AutoConfig.from_pretrained(folder))
        model.float().save_pretrained(plain)
        shapes = {name: w.shape for name, w in load_file(plain / "model.safetensors").items()}
        tensors = {name: seeded_tensor(seed, name, shape) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        model, info = auto.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(tokens).logits.numpy()[0, SHOWN]


def main(target: Path, families: list[str]) -> None:
    """Writes all families, or these in place of what the files have of them."""
    target /= "golden_configs"
    target.mkdir(exist_ok=True)
    found, saved = [], {}
    if families:
        before = json.loads((target / "configs.json").read_text())
        found = [case for case in before if case["config"]["model_type"] not in families]
        logits_before = np.load(target / "logits.npz")
        names = {case["name"] for case in found} & set(logits_before.files)
        saved = {name: logits_before[name] for name in logits_before.files if name in names}
    for family, (extra, options) in FAMILIES.items():
        if families and family not in families:
            continue
        for i, (drawn, may_refuse) in enumerate(draws(len(found), options)):
            name, seed = f"{family}_{i}", len(found)
            config = dict(model_type=family) | SHAPE | extra | drawn
            try:
                saved[name] = logits(config, seed)
            except Exception as error:
                if not may_refuse:
                    raise ValueError(f"transformers refuses {drawn}") from error
                print(f"{name}: transformers refuses {may_refuse}: {error}"[:200])
            found.append(dict(name=name, seed=seed, config=config, may_refuse=may_refuse))
    (target / "configs.json").write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    np.savez_compressed(target / "logits.npz", **saved)
    largest = max(np.abs(values).max() for values in saved.values())
    print(f"{len(found)} configs, {len(saved)} with logits, |logit| up to {largest:.1f}")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main(Path(sys.argv[1]), sys.argv[2:])
