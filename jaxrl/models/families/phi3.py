"""Phi-3, Phi-4 and Phi-4-mini (https://arxiv.org/abs/2503.01743).

Queries, keys and values are one projection, and so are gate and up of the MLP. Definition:
transformers' model type `phi3`.
"""

import dataclasses
import math
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, rotary
from jaxrl.models.rope_config import LONG_ROPE, Rope

ENTRIES = entries.Entries(
    classes=("Phi3",),
    read=entries.READ | entries.LATER_LEN | entries.WINDOWS | {"hidden_act"},
    neutral=frozenset({"attention_dropout", "embd_pdrop", "resid_pdrop"}),
)
DEFAULTS: dict[str, Any] = dict(  # of transformers
    rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096
)
FACTORS = ("short_factor", "long_factor")
ORIGINAL_LEN = rotary.ORIGINAL_LEN
OWN = (*FACTORS, "factor", "attention_factor", ORIGINAL_LEN)  # rotary entries of longrope


def read_rope(c: fields.ConfigJson) -> Rope:
    """The rotary embedding: plain, or with a divisor for every pair (longrope).

    Raises ValueError for other scalings, and for lists of another length.
    """
    entry = dict(c.get("rope_scaling") or c.get("rope_parameters") or {})
    kind = entry.pop("rope_type", None) or entry.get("type") or "default"
    own = {name: entry.pop(name, None) for name in (*OWN, "type")}
    top = {name: value for name, value in c.items() if name not in (ORIGINAL_LEN, "rope_scaling")}
    rope = rotary.read_rope(top | dict(rope_parameters=entry), partial=True)
    if kind == "default":
        return rope
    if kind != LONG_ROPE:
        raise ValueError(f"rope_scaling {kind!r} of phi3 models is not known; known: {LONG_ROPE}")
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    n_pairs = int(head_dim * rope.rotary) // 2
    for name in FACTORS:
        if not isinstance(own[name], list) or len(own[name]) != n_pairs:
            raise ValueError(f"{name} of rope_scaling needs one number for each of {n_pairs} pairs")
    original = c[ORIGINAL_LEN]  # in transformers, that of the top level comes first
    factor = float(own["factor"] or c["max_position_embeddings"] / original)
    return dataclasses.replace(
        rope,
        kind=LONG_ROPE,
        factor=factor,
        original_len=original,
        attention_factor=float(own["attention_factor"] or amplitude(factor, original)),
        short_factor=tuple(map(float, own["short_factor"])),
        long_factor=tuple(map(float, own["long_factor"])),
    )


def amplitude(factor: float, original_len: int) -> float:
    """sqrt(1 + ln(factor) / ln(original_len)) (https://arxiv.org/abs/2402.13753, section 3.3)."""
    return math.sqrt(1 + math.log(factor) / math.log(original_len)) if factor > 1 else 1.0


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for rotary scalings that the family does not have."""
    c = DEFAULTS | dict(c)
    return fields.base_config(
        c,
        "phi3",
        windows=fields.uniform_windows(c, c.get("sliding_window")),
        rope=read_rope(c),
        qkv_fused=True,
        mlp_fused=True,
    )


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    rope = cfg.attention_layers[0].rope
    return fields.base_json(cfg, "phi3", "Phi3ForCausalLM") | dict(
        sliding_window=fields.largest_window(cfg),
        partial_rotary_factor=rope.rotary,
        **(long_rope_json(rope, cfg.max_len) if rope.kind == LONG_ROPE else {}),
    )


def long_rope_json(rope: Rope, max_len: int) -> dict[str, Any]:
    """Entries of a longrope; factors that follow from the lengths are left out."""
    entry: dict[str, Any] = {name: list(getattr(rope, name)) for name in FACTORS}
    if rope.factor != max_len / rope.original_len:
        entry["factor"] = rope.factor
    if rope.attention_factor != amplitude(rope.factor, rope.original_len):
        entry["attention_factor"] = rope.attention_factor
    return {"rope_scaling": dict(type=LONG_ROPE) | entry, ORIGINAL_LEN: rope.original_len}
