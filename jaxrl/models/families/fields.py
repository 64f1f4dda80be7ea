"""Shared fields of the families' config.json files: sizes, rotary embedding, layer types.

transformers 5 writes `rope_parameters` (per layer type if they differ) and `layer_types`; older
files have `rope_theta`, `rope_scaling` and `sliding_window_pattern`. Both are read. The older names
are written, because every version understands them.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxrl.models.config import ROPE_KINDS, DecoderConfig, Rope

Json = Mapping[str, Any]
LOCAL, GLOBAL = "sliding_attention", "full_attention"
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def base_config(c: Json, family: str, *, theta: float = 10_000.0) -> DecoderConfig:
    """The fields that every family has; absent keys get transformers' defaults.

    `theta` is the family's default rotary base.
    """
    N, D = c["num_attention_heads"], c["hidden_size"]
    act = c.get("hidden_activation") or c.get("hidden_act") or "silu"
    if act not in ACTIVATIONS:
        raise ValueError(f"activation {act!r} is not known; known: {', '.join(ACTIVATIONS)}")
    return DecoderConfig(
        family=family,
        L=c["num_hidden_layers"],
        D=D,
        N=N,
        K=c.get("num_key_value_heads") or N,
        H=c.get("head_dim") or D // N,
        F=c["intermediate_size"],
        V=c["vocab_size"],
        norm_eps=float(c.get("rms_norm_eps", 1e-6)),
        tied=c.get("tie_word_embeddings", False),
        act=ACTIVATIONS[act],
        max_len=c["max_position_embeddings"],
        rope=read_rope(c, theta=theta),
    )


def base_json(cfg: DecoderConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """The inverse of `base_config`, with the keys that select transformers' model class."""
    act = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[cfg.act]
    return dict(
        architectures=[architecture],
        model_type=model_type,
        hidden_size=cfg.D,
        intermediate_size=cfg.F,
        num_hidden_layers=cfg.L,
        num_attention_heads=cfg.N,
        num_key_value_heads=cfg.K,
        head_dim=cfg.H,
        vocab_size=cfg.V,
        max_position_embeddings=cfg.max_len,
        rms_norm_eps=cfg.norm_eps,
        tie_word_embeddings=cfg.tied,
        hidden_act=act,
        rope_theta=cfg.rope.theta,
        rope_scaling=scaling_json(cfg.rope),
    )


def read_rope(c: Json, *, theta: float = 10_000.0, kind: str = GLOBAL) -> Rope:
    """Rotary embedding of one kind of layer; `theta` is the family's default base.

    Raises ValueError for scalings that are not in `ROPE_KINDS`.
    """
    parameters = c.get("rope_parameters") or {}
    parameters = (parameters.get(kind) or {}) if {LOCAL, GLOBAL} & parameters.keys() else parameters
    theta = parameters.get("rope_theta", c.get("rope_theta", theta))
    scaling = parameters or c.get("rope_scaling") or {}
    if scaling.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    match scaling.get("rope_type") or scaling.get("type") or "default":
        case "default":
            return Rope(theta=float(theta))
        case ("linear" | "dynamic") as kind:
            return Rope(theta=float(theta), kind=kind, factor=float(scaling["factor"]))
        case "llama3":
            return Rope(
                theta=float(theta),
                kind="llama3",
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_len=int(scaling["original_max_position_embeddings"]),
            )
        case "yarn":
            return _read_yarn(scaling, theta=float(theta), max_len=c["max_position_embeddings"])
        case other:
            raise ValueError(
                f"rope scaling {other!r} is not supported; supported: {', '.join(ROPE_KINDS)}. "
                "Without scaling the model is correct only up to its original length; to use it "
                "there, remove rope_scaling from config.json"
            )


def _read_yarn(scaling: Json, *, theta: float, max_len: int) -> Rope:
    original_len = int(scaling.get("original_max_position_embeddings") or max_len)
    factor = float(scaling.get("factor") or max_len / original_len)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        one, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if not one or not all_dims:
            one, all_dims = 1.0, 0.0
        attention_factor = yarn_amplitude(factor, one) / yarn_amplitude(factor, all_dims)
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_len=original_len,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=scaling.get("truncate", True),
        attention_factor=float(attention_factor),
    )


def yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    """sqrt(1 / t) = 0.1 ln(factor) + 1 (https://arxiv.org/abs/2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def scaling_json(rope: Rope) -> dict[str, Any] | None:
    """`rope_scaling` of a config file; None without scaling."""
    if rope.kind == "default":
        return None
    if rope.kind in ("linear", "dynamic"):
        return dict(rope_type=rope.kind, factor=rope.factor)
    if rope.kind == "yarn":
        usual = Rope(attention_factor=yarn_amplitude(rope.factor))
        names = ("beta_fast", "beta_slow", "truncate", "attention_factor")
        changed = {n: getattr(rope, n) for n in names if getattr(rope, n) != getattr(usual, n)}
        original = dict(original_max_position_embeddings=rope.original_len)
        return dict(rope_type="yarn", factor=rope.factor) | original | changed
    return dict(
        rope_type="llama3",
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_max_position_embeddings=rope.original_len,
    )


def read_windows(c: Json, default_types: list[str]) -> tuple[int, ...]:
    """Window of each layer by its type, 0 for global layers; () if no layer has a window."""
    types, window = c.get("layer_types") or default_types, c.get("sliding_window")
    if unknown := set(types) - {LOCAL, GLOBAL}:
        raise ValueError(f"layer_types {sorted(unknown)} are not known; known: {LOCAL}, {GLOBAL}")
    if not window or LOCAL not in types:
        return ()
    return tuple(window if kind == LOCAL else 0 for kind in types)


def layer_types(cfg: DecoderConfig) -> list[str]:
    return [LOCAL if cfg.window(i) else GLOBAL for i in range(cfg.L)]


def local_global_pattern(n_layers: int, period: int) -> list[str]:
    """Layer types: local layers, with a global one at the end of every period."""
    return [GLOBAL if (i + 1) % period == 0 else LOCAL for i in range(n_layers)]
