"""Gemma 2 (https://arxiv.org/abs/2408.00118).

Local and global layers alternate, scores and logits are soft-capped, and each block has a norm
before and after.
"""

from typing import Any

from jaxrl.models.config import BOTH_NORMS, DecoderConfig
from jaxrl.models.families import entries, fields

READ = (
    entries.READ
    | entries.WINDOWS
    | {
        *("hidden_activation", "attention_bias", "query_pre_attn_scalar", "attn_logit_softcapping"),
        *("final_logit_softcapping", "use_bidirectional_attention"),
    }
)
ENTRIES = entries.Entries(
    classes=("Gemma2",),
    read=READ | entries.LATER_LEN,
    # transformers reads hidden_activation; the second name of the window is of the first release
    neutral=frozenset({"hidden_act", "sliding_window_size"}),
    neutral_at={"sliding_window_pattern": (2,)},
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    vocab_size=256_000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
)


def gemma_config(c: fields.ConfigJson, family: str, *, period: int, **more: Any) -> DecoderConfig:
    """The config fields that Gemma 2 and 3 share; every `period`-th layer is global."""
    if c.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported; use a causal checkpoint")
    bias = c.get("attention_bias", False)
    act = "hidden_activation"
    c = {**c, act: c[act] or DEFAULTS[act]}
    types = fields.local_global_pattern(c["num_hidden_layers"], period)
    return fields.base_config(
        c,
        family,
        act=act,
        windows=fields.read_windows(c, c["sliding_window"], types),
        qkv_bias=bias,
        o_bias=bias,
        norms=BOTH_NORMS,
        unit_offset=True,
        attn_scale=c["query_pre_attn_scalar"] ** -0.5,
        attn_softcap=softcap(c["attn_logit_softcapping"]),
        logit_softcap=softcap(c["final_logit_softcapping"]),
        embed_scale=c["hidden_size"] ** 0.5,
        **more,
    )


def softcap(value: float | int | None) -> float | None:
    return None if value is None else float(value)


def gemma_json(cfg: DecoderConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """The inverse of `gemma_config`."""
    mixer = cfg.attention_layers[0]
    scalar = mixer.score_scale**-2
    base = fields.base_json(cfg, model_type, architecture)
    return base | dict(
        hidden_activation=base["hidden_act"],
        attention_bias=mixer.qkv_bias,
        query_pre_attn_scalar=round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        attn_logit_softcapping=mixer.softcap,
        final_logit_softcapping=cfg.logit_softcap,
        sliding_window=fields.largest_window(cfg),
        layer_types=fields.layer_types(cfg),
    )


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    return gemma_config(DEFAULTS | dict(c), "gemma2", period=2)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    return gemma_json(cfg, "gemma2", "Gemma2ForCausalLM")
