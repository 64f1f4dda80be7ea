"""Shared fields of the families' config.json files: sizes, activation, windows of layers.

transformers 5 writes `layer_types`; older files have `sliding_window_pattern` or
`max_window_layers`. Both are read.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from jaxrl.models.config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    uniform_decoder,
)
from jaxrl.models.families.rotary import GLOBAL, LOCAL, ConfigJson, read_rope, scaling_json
from jaxrl.models.rope_config import NO_ROPE, Rope

# Name of an activation in config.json -> ours. The first name of each of ours is written.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def base_config(
    c: ConfigJson,
    family: str,
    *,
    rope: Rope | None = None,
    act: str = "hidden_act",
    eps: str = "rms_norm_eps",
    **more: Any,
) -> DecoderConfig:
    """The fields that every family has; absent keys get transformers' defaults.

    `rope` None: read from `c`, with the default base of most families. `act` is the entry of the
    activation, `eps` that of the number in norms. `more` are further fields of `uniform_decoder`.
    """
    N, D = c["num_attention_heads"], c["hidden_size"]
    return uniform_decoder(
        family,
        L=c["num_hidden_layers"],
        D=D,
        N=N,
        K=c.get("num_key_value_heads") or N,
        H=c.get("head_dim") or D // N,
        F=c["intermediate_size"],
        V=c["vocab_size"],
        norm_eps=float(c.get(eps, 1e-6)),
        tied=c.get("tie_word_embeddings", False),
        act=read_activation(c, act),
        max_len=c["max_position_embeddings"],
        rope=rope or read_rope(c),
        **more,
    )


def read_activation(c: ConfigJson, name: str) -> str:
    """The activation in the entry `name`. Raises ValueError for unknown ones."""
    activation = c.get(name) or "silu"
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"{name} is {activation!r}, which is not known; known: {known}")
    return ACTIVATIONS[activation]


def base_json(cfg: DecoderConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """The inverse of `base_config`, with the keys that select transformers' model class."""
    mixer, ffn, rope = cfg.paged_layers[0], cfg.layers[0].ffn, global_rope(cfg)
    act = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == ffn.act)
    return dict(
        architectures=[architecture],
        model_type=model_type,
        hidden_size=cfg.D,
        intermediate_size=cfg.dense_F or ffn.F,
        num_hidden_layers=cfg.L,
        num_attention_heads=mixer.N,
        num_key_value_heads=mixer.K,
        head_dim=mixer.H,
        vocab_size=cfg.V,
        max_position_embeddings=cfg.max_len,
        rms_norm_eps=cfg.norm_eps,
        tie_word_embeddings=cfg.tied,
        hidden_act=act,
        rope_theta=rope.theta,
        rope_scaling=scaling_json(rope),
    )


def global_rope(cfg: DecoderConfig) -> Rope:
    """The rotary embedding of layers without a window; of all that have one if these have none."""
    mixers = [mixer for mixer in cfg.paged_layers if mixer.rope.kind != NO_ROPE]
    mixers = mixers or cfg.paged_layers
    return next((mixer.rope for mixer in mixers if not mixer.window), mixers[0].rope)


def largest_window(cfg: DecoderConfig) -> int | None:
    """`sliding_window` of config.json; None if no layer has one."""
    return max(layer.mixer.window for layer in cfg.layers) or None


def read_layer_types(c: ConfigJson, default: list[str], known: tuple[str, ...]) -> list[str]:
    """`layer_types`. Raises ValueError for unknown ones, and if a layer has none."""
    types = c.get("layer_types") or default
    if unknown := sorted(set(types) - set(known)):
        raise ValueError(f"layer_types {unknown} are not known; known: {', '.join(known)}")
    if len(types) != (n_layers := c["num_hidden_layers"]):
        raise ValueError(f"layer_types has {len(types)} entries for {n_layers} layers")
    return types


def read_windows(c: ConfigJson, window: int | None, default_types: list[str]) -> tuple[int, ...]:
    """Window of each layer by its type, 0 for global layers; () if no layer has a window.

    Raises ValueError for unknown types, and for local layers without a window.
    """
    types = read_layer_types(c, default_types, (LOCAL, GLOBAL))
    if LOCAL not in types:
        return ()
    if not window:
        raise ValueError(
            f"layers have the type {LOCAL} and sliding_window is {window}; set sliding_window, or "
            f"layer_types to {GLOBAL} for every layer"
        )
    return tuple(window if kind == LOCAL else 0 for kind in types)


def uniform_windows(c: ConfigJson, window: int | None) -> tuple[int, ...]:
    """Windows of a family whose layers all have the same one; transformers ignores layer_types."""
    types = uniform_types(c, window)
    if (found := c.get("layer_types") or types) != types:
        raise ValueError(
            f"layer_types {sorted(set(found))} contradict sliding_window={window}: every layer is "
            f"{types[0]} in transformers; remove layer_types"
        )
    return read_windows(c, window, types)


def uniform_types(c: ConfigJson, window: int | None) -> list[str]:
    return [GLOBAL if window is None else LOCAL] * c["num_hidden_layers"]


def n_experts(c: ConfigJson) -> int:
    """Experts of a layer; transformers takes num_experts and num_local_experts as one entry."""
    found = {c[name] for name in ("num_experts", "num_local_experts") if name in c}
    if len(found) > 1:
        raise ValueError(f"num_experts and num_local_experts differ: {sorted(found)}; keep one")
    return found.pop() if found else c["num_experts"]


def with_dense_layers(cfg: DecoderConfig, c: ConfigJson) -> DecoderConfig:
    """Layers of `mlp_only_layers`, and those that `decoder_sparse_step` skips, are dense.

    Raises ValueError if no layer with experts is left.
    """
    only, step = set(c.get("mlp_only_layers") or []), c.get("decoder_sparse_step", 1)
    act = cfg.expert_layers[0].act
    assert isinstance(act, str)
    mlp = MLPConfig(cfg.dense_F, act)
    layers = tuple(
        dataclasses.replace(layer, ffn=mlp) if i in only or (i + 1) % step else layer
        for i, layer in enumerate(cfg.layers)
    )
    dense = dataclasses.replace(cfg, layers=layers)
    if not dense.expert_layers:
        raise ValueError(
            f"mlp_only_layers and decoder_sparse_step={step} leave no layer with experts; use a "
            "dense family's config"
        )
    return dense


def dense_layers_json(cfg: DecoderConfig) -> dict[str, Any]:
    """The inverse of `with_dense_layers`."""
    ffns = enumerate(layer.ffn for layer in cfg.layers)
    dense = [i for i, ffn in ffns if isinstance(ffn, MLPConfig)]
    return dict(decoder_sparse_step=1, mlp_only_layers=dense)


def with_dense_prefix(cfg: DecoderConfig, n_dense: int) -> DecoderConfig:
    """The first layers (`first_k_dense_replace`) are dense.

    Raises ValueError if no layer with experts is left.
    """
    if n_dense >= cfg.L:
        raise ValueError(
            f"first_k_dense_replace={n_dense} leaves none of {cfg.L} layers with experts; use a "
            "dense family's config"
        )
    return with_dense_mlps(cfg, range(n_dense))


def with_dense_mlps(cfg: DecoderConfig, dense: Collection[int]) -> DecoderConfig:
    """The layers of these numbers are dense."""
    act = cfg.expert_layers[0].act
    assert isinstance(act, str)
    mlp = MLPConfig(cfg.dense_F, act)
    layers = tuple(
        dataclasses.replace(layer, ffn=mlp) if i in dense else layer
        for i, layer in enumerate(cfg.layers)
    )
    return dataclasses.replace(cfg, layers=layers)


def experts_json(cfg: DecoderConfig) -> dict[str, Any]:
    """The experts of Qwen's mixtures, all but the weights of a token's experts."""
    experts = cfg.expert_layers[0]
    shared = dict(shared_expert_intermediate_size=experts.shared_F) if experts.shared_F else {}
    return shared | dict(
        num_experts=experts.E,
        num_experts_per_tok=experts.top_k,
        moe_intermediate_size=experts.F,
    )


def without_rope(cfg: DecoderConfig, layers: Collection[int]) -> DecoderConfig:
    """The decoder whose layers of these numbers have no rotary embedding."""

    def changed(i: int, layer: LayerConfig) -> LayerConfig:
        if i not in layers or not isinstance(layer.mixer, AttentionConfig):
            return layer
        old = layer.mixer.rope
        rope = Rope(kind=NO_ROPE, rotary=old.rotary, interleaved=old.interleaved)
        mixer = dataclasses.replace(layer.mixer, rope=rope)
        return dataclasses.replace(layer, mixer=mixer)

    new = tuple(changed(i, layer) for i, layer in enumerate(cfg.layers))
    return dataclasses.replace(cfg, layers=new)


def global_layers(cfg: DecoderConfig) -> list[int]:
    """Numbers of the layers without a window."""
    return [i for i in range(cfg.L) if not cfg.window(i)]


def read_period(c: ConfigJson, default: int) -> int:
    """`sliding_window_pattern` as a number of layers.

    Raises ValueError for a pattern of letters, which transformers reads from layer_types only.
    """
    period = c.get("sliding_window_pattern") or default
    if isinstance(period, str):
        raise ValueError(f"sliding_window_pattern is {period!r} without layer_types; write these")
    return period


def layer_types(cfg: DecoderConfig) -> list[str]:
    return [LOCAL if cfg.window(i) else GLOBAL for i in range(cfg.L)]


def local_global_pattern(n_layers: int, period: int) -> list[str]:
    """Layer types: local layers, with a global one at the end of every period."""
    return [GLOBAL if (i + 1) % period == 0 else LOCAL for i in range(n_layers)]
