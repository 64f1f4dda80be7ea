"""Writes the tiny random checkpoints that the model tests compare with.

tests/models/golden/<name>/ has a checkpoint of every family, saved by transformers, and the logits
of transformers' torch model. tests/models/golden_scores/<name>/ has classifiers with one label and
torch's score of each token.

torch is not a dependency of the project; run this in a separate environment:
    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors numpy
    /tmp/torch/bin/python scripts/make_golden.py tests/models [NAME ...]
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  only in that environment
import transformers

SHAPE = dict(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GEMMA = dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=6)
SMALL = dict(vocab_size=64)  # of families that were added later
HYBRID_MIXTURE = dict(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    rms_norm_eps=1e-3,  # with 1e-6, norms of tiny states would amplify rounding
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=3,
    num_experts=4,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
    rope_parameters=dict(rope_type="default", rope_theta=300.0, partial_rotary_factor=0.5),
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    moe_intermediate_size=20,
)
GEMMA4_PERIOD = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA4 = SMALL | dict(
    head_dim=16,
    global_head_dim=32,
    sliding_window=6,
    final_logit_softcapping=5.0,
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.25),
        sliding_attention=dict(rope_type="default", rope_theta=100.0),
    ),
)
# Windows are shorter than the rows; caps are small enough to change the values.
MODELS = {
    "llama": ("Llama", dict(num_hidden_layers=2, rope_theta=500.0)),
    "llama3_rope": (
        "Llama",
        dict(
            num_hidden_layers=2,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10_000.0,
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
    ),
    "llama_linear_rope": (
        "Llama",
        dict(
            num_hidden_layers=2,
            rope_parameters=dict(rope_type="linear", rope_theta=10_000.0, factor=3.0),
        ),
    ),
    "qwen2": (
        "Qwen2",
        dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", dict(num_hidden_layers=2, head_dim=16)),
    "mistral": ("Mistral", dict(num_hidden_layers=2, head_dim=16, sliding_window=7)),
    "gemma2": (
        "Gemma2",
        dict(
            num_hidden_layers=3,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            **GEMMA,
        ),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            num_hidden_layers=7,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=5_000.0, factor=2.0),
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            ),
            **GEMMA,
        ),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(
            num_hidden_layers=2,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            norm_topk_prob=True,
        ),
    ),
    "qwen3_moe_plain": (
        "Qwen3Moe",
        dict(
            num_hidden_layers=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=False,
        ),
    ),
    "mixtral": (
        "Mixtral",
        dict(
            num_hidden_layers=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=9,
        ),
    ),
    "llama_yarn_rope": (
        "Llama",
        dict(
            num_hidden_layers=2,
            hidden_size=64,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=500.0,
                factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
    ),
    "qwen3_moe_dense": (
        "Qwen3Moe",
        dict(
            num_hidden_layers=3,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
    ),
    "qwen3_5": (
        "Qwen3_5",
        dict(
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=12,
            linear_conv_kernel_dim=3,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=300.0,
                partial_rotary_factor=0.5,
                mrope_section=[2, 1, 1],
                mrope_interleaved=True,
            ),
        ),
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        dict(num_experts_per_tok=3, **HYBRID_MIXTURE),
    ),
    "qwen3_next": (
        "Qwen3Next",
        dict(
            num_experts_per_tok=2,
            norm_topk_prob=False,
            mlp_only_layers=[1],
            **HYBRID_MIXTURE,
        ),
    ),
    "olmo2": ("Olmo2", dict(num_hidden_layers=2, attention_bias=True, **SMALL)),
    "olmo3": (
        "Olmo3",
        dict(
            num_hidden_layers=3,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                full_attention=dict(
                    rope_type="yarn",
                    rope_theta=500.0,
                    factor=4.0,
                    original_max_position_embeddings=32,
                ),
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            ),
            **SMALL,
        ),
    ),
    "phi3": (
        "Phi3",
        dict(
            num_hidden_layers=2,
            sliding_window=9,
            original_max_position_embeddings=128,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=300.0,
                partial_rotary_factor=0.5,
                original_max_position_embeddings=128,
                factor=4.0,
                short_factor=[1.0, 1.5],
                long_factor=[2.0, 4.0],
            ),
            **SMALL,
        ),
    ),
    "glm4": (
        "Glm4",
        dict(
            num_hidden_layers=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=300.0, partial_rotary_factor=0.5),
            **SMALL,
        ),
    ),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=3, no_rope_layers=[1, 0, 1], **SMALL)),
    "granite": (
        "Granite",
        dict(
            num_hidden_layers=2,
            embedding_multiplier=3.0,
            residual_multiplier=0.3,
            attention_multiplier=0.2,
            logits_scaling=1.7,
            mlp_bias=True,
            **SMALL,
        ),
    ),
    "gemma": ("Gemma", dict(num_hidden_layers=2, head_dim=16, **SMALL)),
    "seed_oss": ("SeedOss", dict(num_hidden_layers=2, head_dim=16, **SMALL)),
    "ministral3": (
        "Ministral3",
        dict(
            num_hidden_layers=2,
            head_dim=16,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=500.0,
                factor=8.0,
                original_max_position_embeddings=16,
                llama_4_scaling_beta=0.4,
            ),
            **SMALL,
        ),
    ),
    "cohere2": (
        "Cohere2",
        dict(
            num_hidden_layers=3,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            logit_scale=0.3,
            **SMALL,
        ),
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        dict(
            num_hidden_layers=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=20,
            use_sliding_window=True,
            sliding_window=7,
            **SMALL,
        ),
    ),
    "exaone4": (
        "Exaone4",
        dict(
            num_hidden_layers=3,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            **SMALL,
        ),
    ),
    "starcoder2": ("Starcoder2", dict(num_hidden_layers=2, sliding_window=7, **SMALL)),
    "glm4_moe": (
        "Glm4Moe",
        dict(
            num_hidden_layers=3,
            head_dim=16,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=12,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            n_shared_experts=2,
            n_group=3,
            topk_group=2,
            routed_scaling_factor=1.7,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            rope_parameters=dict(rope_type="default", rope_theta=300.0, partial_rotary_factor=0.5),
        ),
    ),
    "gpt_oss": (
        "GptOss",
        dict(
            num_hidden_layers=4,
            head_dim=16,
            sliding_window=6,
            num_local_experts=4,
            num_experts_per_tok=2,
            swiglu_limit=1.5,  # below many of the values
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=300.0,
                factor=4.0,
                beta_fast=4.0,
                original_max_position_embeddings=16,
                truncate=False,
            ),
            **SMALL,
        ),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        dict(
            num_hidden_layers=3,
            n_routed_experts=6,
            num_experts_per_tok=2,
            routed_scaling_factor=1.7,
            rms_norm_eps=1e-2,  # not the one of the norms of both ranks
            rope_parameters=dict(rope_type="default", rope_theta=300.0),
            **LATENT,
            **SMALL,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            num_hidden_layers=3,
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_shared_experts=2,
            n_group=3,
            topk_group=2,
            routed_scaling_factor=1.7,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            attention_bias=True,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=300.0,
                factor=4.0,
                original_max_position_embeddings=32,
                mscale=1.0,
                mscale_all_dim=2.0,
            ),
            **LATENT | dict(q_lora_rank=None, v_head_dim=24),
            **SMALL,
        ),
    ),
    "gemma4": (
        "Gemma4",
        dict(
            num_hidden_layers=6,
            layer_types=2 * GEMMA4_PERIOD,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            **GEMMA4,
        ),
    ),
    "gemma4_moe": (
        "Gemma4",
        dict(
            num_hidden_layers=3,
            layer_types=GEMMA4_PERIOD,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=20,
            **GEMMA4,
        ),
    ),
    "gemma4_shared": (
        "Gemma4",
        dict(
            num_hidden_layers=9,
            layer_types=3 * GEMMA4_PERIOD,
            num_kv_shared_layers=5,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=64,
            **GEMMA4,
        ),
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        dict(
            num_hidden_layers=6,
            layer_types=2 * GEMMA4_PERIOD,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            **GEMMA4,
        ),
    ),
    "lfm2": (
        "Lfm2",
        dict(
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            conv_bias=True,
            block_multiple_of=8,
            block_ffn_dim_multiplier=1.4,
            **SMALL,
        ),
    ),
    "mistral3": (
        "Mistral3",
        dict(
            model_type="ministral3",
            num_hidden_layers=2,
            head_dim=16,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=300.0,
                factor=8.0,
                original_max_position_embeddings=16,
                llama_4_scaling_beta=0.3,
            ),
            **SMALL,
        ),
    ),
    "muse_glimmer": (
        "MuseGlimmer",
        dict(
            num_hidden_layers=4,
            head_dim=16,
            sliding_window=6,
            output_multiplier=0.5,
            final_logit_softcapping=5.0,
            post_norm_eps=0.1,
            **SMALL,
        ),
    ),
    "qwen3_vl": (
        "Qwen3VL",
        dict(
            num_hidden_layers=3,
            head_dim=16,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=300.0,
                mrope_section=[3, 3, 2],
                mrope_interleaved=True,
            ),
            **SMALL,
        ),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        dict(
            num_hidden_layers=2,
            rope_parameters=dict(rope_type="default", rope_theta=300.0, mrope_section=[1, 2, 1]),
            **SMALL,
        ),
    ),
}
QWEN_TOWER = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=32,
)
# Image-and-text models: the fields above are those of text_config.
IMAGES = {
    "Mistral3": dict(
        vision_config=dict(
            model_type="pixtral",
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            head_dim=8,
            image_size=28,
            patch_size=14,
        )
    ),
    "Gemma4Unified": dict(
        vision_config=dict(
            patch_size=2,
            pooling_kernel_size=2,
            mm_embed_dim=32,
            mm_posemb_size=4,
            output_proj_dims=32,
        ),
        audio_config=dict(audio_embed_dim=8),
    ),
    "MuseGlimmer": dict(
        vision_config=dict(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            pos_emb_height=2,
            pos_emb_width=2,
        ),
        out_hidden_size=64,
        projector_hidden_size=16,
    ),
    "Qwen3VL": dict(
        vision_config=QWEN_TOWER | dict(num_position_embeddings=16, deepstack_visual_indexes=[0])
    ),
    "Qwen2_5_VL": dict(vision_config=QWEN_TOWER | dict(window_size=16, fullatt_block_indexes=[0])),
}
WITH_TEXT_CONFIG = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")  # the other class includes images
SCORED = ("llama", "qwen2", "gemma3")
# Rotary frequencies of full-size models: name -> (head size, rope_parameters).
QWEN_YARN = dict(
    rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768
)
ROPES = {
    "qwen2.5 default": (128, dict(rope_type="default", rope_theta=1e6)),
    "qwen2.5 yarn": (128, QWEN_YARN),
    "qwen2.5 yarn, attention_factor": (128, QWEN_YARN | dict(attention_factor=0.8)),
    "llama 2 yarn": (
        128,
        QWEN_YARN
        | dict(rope_theta=1e4, factor=32.0, original_max_position_embeddings=4096, truncate=False),
    ),
    "deepseek yarn": (
        64,
        QWEN_YARN
        | dict(
            rope_theta=1e4,
            factor=40.0,
            original_max_position_embeddings=4096,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.707,
        ),
    ),
    "linear": (64, dict(rope_type="linear", rope_theta=1e4, factor=8.0)),
    "dynamic": (64, dict(rope_type="dynamic", rope_theta=1e4, factor=8.0)),
    "llama3": (
        128,
        dict(
            rope_type="llama3",
            rope_theta=5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
}
ROWS, LENGTH = 2, 40
# Seeds of these checkpoints; those of others follow from the name (`seed_of`).
FIRST = (
    "llama", "llama3_rope", "llama_linear_rope", "qwen2", "qwen3", "mistral", "gemma2", "gemma3",
    "qwen3_moe", "qwen3_moe_plain", "mixtral", "llama_yarn_rope", "qwen3_moe_dense", "qwen3_5",
    "qwen3_5_moe", "qwen3_next", "olmo2", "olmo3", "phi3", "glm4", "smollm3", "granite", "gemma",
    "seed_oss", "ministral3", "cohere2", "qwen2_moe", "exaone4", "starcoder2",
)  # fmt: skip
SEEDS = {name: seed for seed, name in enumerate(FIRST)} | {
    "glm4_moe": 16,
    "gpt_oss": 30,
    "glm4_moe_lite": 30,
    "deepseek_v3": 31,
    "gemma4": 30,
    "gemma4_moe": 31,
    "gemma4_shared": 32,
    "lfm2": 30,
    "mistral3": 31,
    "muse_glimmer": 32,
}


def seed_of(name: str) -> int:
    """The seed of a checkpoint, which does not depend on the order of MODELS."""
    return SEEDS.get(name, zlib.crc32(name.encode()))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Scales weights so that attention is peaked; moves norms and biases from their defaults."""
    generator = torch.Generator().manual_seed(seed)
    stored = ("correction_bias", "layer_scalar")
    buffers = [(name, w) for name, w in model.named_buffers() if name.endswith(stored)]
    for name, weight in [*model.named_parameters(), *buffers]:
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name or name.endswith(("scale", "scalar")):
            weight.data += 0.3 * noise
        elif "bias" in name:
            weight.data = 0.5 * noise
        elif "embed" in name:
            weight.data = 0.3 * noise
        else:
            weight.data = 1.5 * noise / weight.shape[-1] ** 0.5


def routers(config: transformers.PreTrainedConfig) -> dict:
    """Options that make a mixture of experts report its load-balancing loss."""
    return {"output_router_logits": True} if hasattr(config, "router_aux_loss_coef") else {}


def random_tokens(seed: int, vocab_size: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, vocab_size, (ROWS, LENGTH)).astype(np.int32)


def write_scores(target: Path, name: str, seed: int) -> None:
    """A classifier with one label, without its pooling, which keeps only the last token's score."""
    family, extra = MODELS[name]
    text = "Text" if family in WITH_TEXT_CONFIG else ""
    config = getattr(transformers, f"{family}{text}Config")(**SHAPE | extra, num_labels=1)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}{text}ForSequenceClassification")(config)
    model = model.float().eval()
    randomise(model, seed)
    model.save_pretrained(target / name)
    tokens = random_tokens(seed)
    with torch.no_grad():
        scores = model.score(model.model(torch.from_numpy(tokens).long())[0])[..., 0]
        last = model(torch.from_numpy(tokens).long()).logits[:, 0]
    assert torch.equal(last, scores[:, -1])
    np.savez(target / name / "golden.npz", tokens=tokens, scores=scores.numpy())
    print(f"{name}: |score| up to {scores.abs().max():.1f}")


def write_ropes(path: Path) -> None:
    """Frequencies and amplitudes of transformers, before any sequence is longer than usual."""
    found = []
    for name, (head_dim, parameters) in ROPES.items():
        shape: dict[str, Any] = SHAPE | dict(max_position_embeddings=131072, head_dim=head_dim)
        config = transformers.LlamaConfig(**shape, rope_parameters=dict(parameters))
        rope = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        found.append(
            dict(
                name=name,
                head_dim=head_dim,
                rope_parameters=parameters,
                inv_freq=rope.inv_freq.tolist(),
                attention_factor=rope.attention_scaling,
            )
        )
    path.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


def main(target: Path, names: list[str]) -> None:
    """Writes all files, or the checkpoints of these names only."""
    if not names:
        write_ropes(target / "layers" / "golden_rope.json")
        for seed, name in enumerate(SCORED):
            write_scores(target / "golden_scores", name, 100 + seed)
    target /= "golden"
    for name, (family, extra) in MODELS.items():
        if names and name not in names:
            continue
        text = "Text" if family in WITH_TEXT_CONFIG else ""
        shape, head = SHAPE | extra, "CausalLM"
        if images := IMAGES.get(family):
            shape, head = dict(images, text_config=shape), "ConditionalGeneration"
        config = getattr(transformers, f"{family}{text}Config")(**shape)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}For{head}")(config).float().eval()
        seed = seed_of(name)
        randomise(model, seed)
        model.save_pretrained(target / name)
        tokens = random_tokens(seed, model.config.get_text_config().vocab_size)
        with torch.no_grad():
            out = model(torch.from_numpy(tokens).long(), **routers(config))
        logits = out.logits.numpy()
        saved = {} if out.get("aux_loss") is None else dict(aux_loss=out.aux_loss.numpy())
        np.savez(target / name / "golden.npz", tokens=tokens, logits=logits, **saved)
        print(f"{name}: |logit| up to {np.abs(logits).max():.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
