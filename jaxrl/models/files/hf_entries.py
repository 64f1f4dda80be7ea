"""The entries of config.json that are read, with their types and the sizes that are plausible.

The limits are far above any published model. They keep a damaged file from a huge allocation, or
from building millions of layers, before the weights show that it is wrong.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

from jaxrl.json_text import shown
from jaxrl.models.config import AttentionConfig, DecoderConfig, MLAConfig, RouterConfig
from jaxrl.models.state_mixers import GatedDeltaNetConfig

INTEGERS = {  # smallest and largest value
    "num_hidden_layers": (1, 1000),
    "hidden_size": (1, 2**20),
    "num_attention_heads": (1, 2**14),
    "num_key_value_heads": (0, 2**14),
    "head_dim": (0, 2**14),
    "intermediate_size": (1, 2**24),
    "moe_intermediate_size": (1, 2**24),
    "shared_expert_intermediate_size": (0, 2**24),
    "n_routed_experts": (1, 2**16),
    "n_shared_experts": (1, 2**10),
    "n_group": (1, 2**16),
    "topk_group": (1, 2**16),
    "first_k_dense_replace": (0, 1000),
    "kv_lora_rank": (1, 2**16),
    "q_lora_rank": (1, 2**16),
    "qk_head_dim": (1, 2**14),
    "qk_nope_head_dim": (1, 2**14),
    "qk_rope_head_dim": (2, 2**14),
    "v_head_dim": (1, 2**14),
    "num_nextn_predict_layers": (0, 1000),
    "num_mtp_layers": (0, 1000),
    "vocab_size": (1, 2**26),
    "max_position_embeddings": (1, 2**31),
    "num_experts": (1, 2**16),
    "num_local_experts": (1, 2**16),
    "num_experts_per_tok": (1, 2**16),
    "sliding_window": (0, 2**31),
    "max_window_layers": (0, 10_000),
    "decoder_sparse_step": (1, 10_000),
    "no_rope_layer_interval": (1, 10_000),
    "full_attention_interval": (1, 10_000),
    "linear_num_key_heads": (1, 2**14),
    "linear_num_value_heads": (1, 2**14),
    "linear_key_head_dim": (1, 2**14),
    "linear_value_head_dim": (1, 2**14),
    "linear_conv_kernel_dim": (2, 64),
    "conv_L_cache": (2, 64),
    "block_ff_dim": (1, 2**24),
    "block_multiple_of": (1, 2**24),
    "original_max_position_embeddings": (1, 2**31),
    "global_head_dim": (2, 2**14),
    "num_global_key_value_heads": (1, 2**14),
    "num_kv_shared_layers": (0, 1000),
    "hidden_size_per_layer_input": (0, 2**20),
    "vocab_size_per_layer_input": (1, 2**26),
    "top_k_experts": (1, 2**16),
}
NUMBERS = {
    "rms_norm_eps": (0.0, 1.0),
    "layer_norm_eps": (0.0, 1.0),
    "norm_epsilon": (0.0, 1.0),
    "norm_eps": (0.0, 1.0),
    "post_norm_eps": (0.0, 1.0),
    "qk_scale_factor": (1e-6, 1e6),
    "output_multiplier": (1e-6, 1e6),
    "block_ffn_dim_multiplier": (1e-6, 1e6),
    "attention_multiplier": (1e-6, 1e6),
    "embedding_multiplier": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "logits_scaling": (1e-6, 1e6),
    "logit_scale": (1e-6, 1e6),
    "llama_4_scaling_beta": (0.0, 1e6),
    "query_pre_attn_scalar": (1e-6, 1e6),
    "attn_logit_softcapping": (1e-6, 1e6),
    "final_logit_softcapping": (1e-6, 1e6),
    "rope_theta": (1e-6, 1e15),
    "rope_local_base_freq": (1e-6, 1e15),
    "factor": (1e-6, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "partial_rotary_factor": (0.0, 1.0),
    "routed_scaling_factor": (1e-6, 1e6),
    "swiglu_limit": (1e-6, 1e6),
    "swiglu_alpha": (1e-6, 1e6),
}
FLAGS = {
    *("attention_bias", "mlp_bias", "norm_topk_prob", "tie_word_embeddings", "truncate"),
    *("use_sliding_window", "attention_out_bias", "qkv_bias", "use_bias", "use_qk_norm"),
    *("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp", "rope_interleave"),
    *("conv_bias", "block_auto_adjust_ff_dim", "tie_embedding"),
}
TEXTS = {"hidden_act", "hidden_activation", "rope_type", "type"}
LISTS: dict[str, type] = {
    "layer_types": str,
    "mlp_layer_types": str,
    "full_attn_idxs": int,
    "mlp_only_layers": int,
    "mrope_section": int,
    "no_rope_layers": int,
}
# A number of layers, or a pattern of letters such as LLLG.
PATTERN, MAX_PATTERN = "sliding_window_pattern", 10_000
OBJECTS = {"text_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention"}
# null in these is the same as no entry, or switches a feature off.
NULLABLE = {
    *TEXTS,
    *LISTS,
    *OBJECTS,
    "attention_factor",
    "attn_logit_softcapping",
    "block_ffn_dim_multiplier",
    "final_logit_softcapping",
    "head_dim",
    "mscale",
    "mscale_all_dim",
    "num_key_value_heads",
    "q_lora_rank",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "num_global_key_value_heads",
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
}
MAX_BLOCKS = 200_000  # layers times experts


def check_entries(config: Mapping[str, Any], depth: int = 3) -> None:
    """Raises ValueError for the first entry with another type or an implausible value.

    `depth` is that of text_config, rope_parameters and full_attention inside each other.
    """
    for key, value in config.items():
        if value is None and key in NULLABLE:
            continue
        if key in OBJECTS:
            if not isinstance(value, dict):
                raise wrong(key, value, "an object")
            if depth:
                check_entries(value, depth - 1)
        elif key in INTEGERS:
            low, high = INTEGERS[key]
            if type(value) is not int or not low <= value <= high:
                raise wrong(key, value, f"an integer from {low} to {high}")
        elif key == PATTERN and not is_pattern(value):
            raise wrong(key, value, f"an integer from 0 to {MAX_PATTERN}")
        elif key in NUMBERS:
            low, high = NUMBERS[key]
            if not is_number(value) or not low <= value <= high:
                raise wrong(key, value, f"a number from {low:g} to {high:g}")
        elif key in FLAGS and type(value) is not bool:
            raise wrong(key, value, "true or false")
        elif key in TEXTS and not isinstance(value, str):
            raise wrong(key, value, "a string")
        elif key in LISTS and not is_list_of(LISTS[key], value):
            raise wrong(key, value, f"a list of {LISTS[key].__name__}")


def is_number(value: Any) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def is_pattern(value: Any) -> bool:
    """Whether a value is a number of layers, or a text that names the kind of each."""
    if isinstance(value, str):
        return 0 < len(value) <= MAX_PATTERN and set(value) <= {"L", "G"}
    return type(value) is int and 0 <= value <= MAX_PATTERN


def wrong(key: str, value: Any, expected: str) -> ValueError:
    return ValueError(
        f"{key} is {shown(value)}, expected {expected}; use the model's own config.json"
    )


def check_decoder(cfg: DecoderConfig) -> None:
    """Raises ValueError if the sizes contradict each other, or imply far too many tensors."""
    errors = []
    for mixer in dict.fromkeys(layer.mixer for layer in cfg.layers):
        if isinstance(mixer, GatedDeltaNetConfig) and mixer.N % mixer.K:
            errors.append(f"{mixer.N} value heads are not a multiple of {mixer.K} key heads")
        if isinstance(mixer, MLAConfig) and mixer.rotated % 2:
            errors.append(f"{mixer.rotated} rotated features of a head are not even")
        if not isinstance(mixer, AttentionConfig):
            continue
        rotated = mixer.H * mixer.rope.rotary
        if mixer.H < 2 or mixer.H % 2:
            errors.append(f"head size {mixer.H} ({cfg.D} features, {mixer.N} heads) is not even")
        elif rotated < 2 or rotated % 2:
            errors.append(f"{rotated:g} rotated features of a head are not even")
        if mixer.N % mixer.K:
            errors.append(
                f"{mixer.N} attention heads are not a multiple of {mixer.K} key-value heads"
            )
    for ffn in dict.fromkeys(cfg.expert_layers):
        errors += router_errors(ffn.router, ffn.E)
    n_experts = sum(ffn.E for ffn in cfg.expert_layers)
    if n_experts > MAX_BLOCKS:
        errors.append(f"{cfg.L} layers with {n_experts} experts are more than {MAX_BLOCKS} blocks")
    errors = list(dict.fromkeys(errors))
    if errors:
        raise ValueError(f"{'; '.join(errors)}; use the model's own config.json")


def router_errors(router: RouterConfig, n_experts: int) -> list[str]:
    """Contradictions between the sizes of a router of `n_experts`."""
    k, n_groups, top_groups = router.top_k, router.n_groups, router.top_groups
    if k > n_experts:
        return [f"{k} experts per token of {n_experts} experts"]
    if n_experts % n_groups or top_groups > n_groups:
        return [f"n_group={n_groups} and topk_group={top_groups} divide no {n_experts} experts"]
    size = n_experts // n_groups
    if n_groups > 1 and size < 2:
        return [f"groups of one expert (n_group={n_groups}); a group has a score with two or more"]
    if k > top_groups * size:
        return [f"{k} experts per token of {top_groups} groups (topk_group) of {size} experts"]
    return []
