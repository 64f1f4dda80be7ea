"""Fields of multi-head latent attention, which DeepSeek-V3 and GLM-4.7-Flash share."""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig, MLAConfig
from jaxrl.models.families import fields, rotary

SIZES: dict[str, str] = {  # entry of config.json -> field of MLAConfig
    "qk_nope_head_dim": "nope",
    "qk_rope_head_dim": "rotated",
    "v_head_dim": "V",
    "kv_lora_rank": "latent",
}
# qk_head_dim and head_dim are written by transformers, and are those of the sizes.
READ = frozenset({*SIZES, "q_lora_rank", "qk_head_dim", "rope_interleave", "attention_bias"})


def with_mla(cfg: DecoderConfig, c: fields.ConfigJson) -> DecoderConfig:
    """The decoder with the latent attention of the config in every layer.

    Raises ValueError for sizes that contradict each other.
    """
    rope = dataclasses.replace(rotary.read_rope(c), interleaved=c.get("rope_interleave", True))
    mixer = MLAConfig(
        N=c["num_attention_heads"],
        **{field: c[name] for name, field in SIZES.items()},
        rope=rope,
        q_rank=c["q_lora_rank"] or 0,
        bias=c.get("attention_bias", False),
        mscale_all_dim=read_mscale(c) if rope.kind != "default" else 0.0,
    )
    derived = dict(num_key_value_heads=mixer.N, head_dim=mixer.rotated, qk_head_dim=mixer.H)
    for name, value in derived.items():
        if c.get(name) not in (None, value):
            raise ValueError(
                f"{name} is {c[name]}, and the heads of latent attention have {value} "
                "(num_attention_heads, qk_rope_head_dim, qk_nope_head_dim); remove it"
            )
    layers = tuple(dataclasses.replace(layer, mixer=mixer) for layer in cfg.layers)
    return dataclasses.replace(cfg, layers=layers)


def read_mscale(c: fields.ConfigJson) -> float:
    """`mscale_all_dim` of a rotary scaling, which scales the scores of all features of a head."""
    entries = c.get("rope_scaling") or c.get("rope_parameters") or {}
    return float(entries.get("mscale_all_dim") or 0.0)


def mla_json(cfg: DecoderConfig) -> dict[str, Any]:
    """The inverse of `with_mla`."""
    (mixer,) = {layer.mixer for layer in cfg.layers}
    assert isinstance(mixer, MLAConfig)
    scaling = rotary.scaling_json(mixer.rope)
    if scaling and mixer.mscale_all_dim:
        # Without attention_factor, transformers would compute it from mscale_all_dim.
        factor = dict(attention_factor=mixer.rope.attention_factor)
        factor = factor if mixer.rope.kind == "yarn" else {}
        scaling |= dict(mscale_all_dim=mixer.mscale_all_dim) | factor
    return {name: getattr(mixer, field) for name, field in SIZES.items()} | dict(
        head_dim=mixer.rotated,
        q_lora_rank=mixer.q_rank or None,
        rope_interleave=mixer.rope.interleaved,
        attention_bias=mixer.bias,
        rope_scaling=scaling,
    )
