"""Gemma 4, text: 26B-A4B and 31B, E2B and E4B; 12B is `gemma4_unified`.

Local and global layers differ in head dim and kv heads; values are normalized. In 26B and 31B
they are the keys of global layers. The last layers of E2B and E4B use the keys and values of
earlier ones, and every layer has inputs by token. 26B has experts next to the MLP. Definition:
transformers' model type `gemma4_text`.
"""

import dataclasses
from typing import Any

from jaxrl.json_text import shown
from jaxrl.models.config import (
    BOTH_NORMS,
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    RouterConfig,
)
from jaxrl.models.families import entries, fields, gemma2, rotary
from jaxrl.models.rope_config import PROPORTIONAL, Rope
from jaxrl.models.shared_kv import SharedKV

TOKEN_INPUTS = {"hidden_size_per_layer_input", "vocab_size_per_layer_input", "pad_token_id"}
EXPERTS = {"enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"}
READ = (
    entries.READ
    | entries.WINDOWS
    | {
        *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config"),
        *("num_kv_shared_layers", "use_double_wide_mlp", "use_bidirectional_attention"),
        *("hidden_activation", "attention_bias", "final_logit_softcapping"),
    }
)
ENTRIES = entries.Entries(classes=("Gemma4", "Gemma4Text"), read=READ | TOKEN_INPUTS | EXPERTS)
# The top level of a model with images and audio; its language model is in text_config.
IMAGE_ENTRIES = entries.Entries(
    classes=("Gemma4",),
    read=frozenset(
        {"model_type", "architectures", "auto_map", "text_config", "tie_word_embeddings"}
    ),
    neutral=frozenset(
        {
            *("vision_config", "audio_config", "vision_soft_tokens_per_image"),
            *(f"{name}_token_id" for name in ("boi", "eoi", "image", "video", "boa", "audio")),
            *("eoa_token_index", "eoa_token_id"),
        }
    ),
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = dict(
    vocab_size=262_144,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    global_head_dim=512,
    num_global_key_value_heads=None,
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
    attention_bias=False,
    sliding_window=512,
    final_logit_softcapping=None,
    vocab_size_per_layer_input=262_144,
    pad_token_id=0,
    hidden_size_per_layer_input=256,
    attention_k_eq_v=False,
    num_kv_shared_layers=0,
    use_double_wide_mlp=False,
    enable_moe_block=False,
)
ROPES: dict[str, Any] = {
    rotary.LOCAL: dict(rope_type="default", rope_theta=10_000.0),
    rotary.GLOBAL: dict(rope_type=PROPORTIONAL, rope_theta=1_000_000.0, partial_rotary_factor=0.25),
}
EXPERT_NORMS = (
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    return decoder_config(DEFAULTS | dict(c), "gemma4")


def decoder_config(c: fields.ConfigJson, family: str) -> DecoderConfig:
    """Raises ValueError for attention to later tokens, and for sizes that no part here has."""
    if (kind := c.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise ValueError(
            f"use_bidirectional_attention is {shown(kind)}; only 'vision' is supported, by which "
            "the tokens of an image see each other. Use a causal checkpoint"
        )
    act = fields.read_activation(c, "hidden_activation")
    types = layer_types(c)
    mixers = {kind: attention(c, kind) for kind in dict.fromkeys(types)}
    shared = shared_layers(types, c["num_kv_shared_layers"])
    layers = []
    for kind, part in zip(types, shared, strict=True):
        mixer = dataclasses.replace(mixers[kind], shared=part)
        ffn = feed_forward(c, act, mixer.reads_kv)
        layers.append(LayerConfig(mixer, ffn, BOTH_NORMS, scalar=True))
    P = c["hidden_size_per_layer_input"] or 0
    return DecoderConfig(
        family,
        D=c["hidden_size"],
        V=c["vocab_size"],
        layers=tuple(layers),
        norm_eps=float(c.get("rms_norm_eps", 1e-6)),
        norm_rounds_last=True,
        tied=c["tie_word_embeddings"],
        logit_softcap=gemma2.softcap(c["final_logit_softcapping"]),
        embed_scale=c["hidden_size"] ** 0.5,
        max_len=c["max_position_embeddings"],
        input_P=P,
        input_V=c["vocab_size_per_layer_input"] if P else 0,
        input_pad=padding_token(c) if P else 0,
        dense_F=c["intermediate_size"] if c["enable_moe_block"] else 0,
    )


def padding_token(c: fields.ConfigJson) -> int:
    """The token whose inputs those of images have. Raises ValueError if the table has none."""
    pad, n = c["pad_token_id"] or 0, c["vocab_size_per_layer_input"]
    if not isinstance(pad, int) or not 0 <= pad < n:
        raise ValueError(
            f"pad_token_id is {shown(pad)}, which gives the tokens of images their inputs, and "
            f"the table of these has {n} tokens; set it to one of them"
        )
    return pad


def layer_types(c: fields.ConfigJson) -> list[str]:
    """The type of every layer. The last one is global, whatever its entry, as in transformers."""
    default = fields.local_global_pattern(c["num_hidden_layers"], 6)
    types = fields.read_layer_types(c, default, (rotary.LOCAL, rotary.GLOBAL))
    return [*types[:-1], rotary.GLOBAL]


def attention(c: fields.ConfigJson, kind: str) -> AttentionConfig:
    """The attention of layers of this type."""
    K, H = c["num_key_value_heads"], c["head_dim"]
    k_eq_v = kind == rotary.GLOBAL and c["attention_k_eq_v"]
    if kind == rotary.GLOBAL:
        K, H = global_sizes(c)
    window = c["sliding_window"] if kind == rotary.LOCAL else 0
    if kind == rotary.LOCAL and not window:
        raise ValueError(f"layers have the type {kind} and sliding_window is {window}; set it")
    return AttentionConfig(
        N=c["num_attention_heads"],
        K=K,
        H=H,
        rope=read_rope(c, kind),
        window=window,
        qkv_bias=c["attention_bias"],
        o_bias=c["attention_bias"],
        qk_norm=True,
        v_norm=True,
        k_eq_v=k_eq_v,
        scale=1.0,
        # transformers: not in global layers
        whole_images=kind == rotary.LOCAL and c.get("use_bidirectional_attention") == "vision",
    )


def global_sizes(c: fields.ConfigJson) -> tuple[int, int]:
    """(kv heads, head dim) of global layers.

    They have entries, or objects by layer number in `per_layer_config`, which replace these: a
    layer without an object then has the sizes of the others.
    """
    K, H = c["num_key_value_heads"], c["global_head_dim"]
    if c["attention_k_eq_v"]:
        K = c["num_global_key_value_heads"] or K
    objects = c.get("per_layer_config")
    if objects is None:
        return K, H
    layers = [i for i, kind in enumerate(layer_types(c)) if kind == rotary.GLOBAL]
    sizes = dict(num_key_value_heads=c["num_key_value_heads"], head_dim=c["head_dim"])
    found = by_layer(objects)
    first = (found or {}).get(layers[0], {})
    if found not in ({}, dict.fromkeys(layers, first)) or first.keys() - sizes:
        raise ValueError(
            f"per_layer_config is {shown(objects)}; supported are the same {' and '.join(sizes)} "
            f"in all layers of the type {rotary.GLOBAL}, and nothing else"
        )
    K, H = (sizes | first).values()
    if c["num_key_value_heads"] != K and not c["attention_k_eq_v"]:
        raise ValueError(
            "num_key_value_heads of per_layer_config differs from that of all layers without "
            "attention_k_eq_v, which is not supported; remove it"
        )
    return K, H


def by_layer(objects: Any) -> dict[int, Any] | None:
    """The entries of `per_layer_config` by number; transformers writes "05" for layer 5 of 60.

    None if it is not an object of objects with such names.
    """
    if not isinstance(objects, dict) or not all(
        name.isdecimal() and isinstance(entry, dict) for name, entry in objects.items()
    ):
        return None
    found = {int(name): entry for name, entry in objects.items()}
    return found if len(found) == len(objects) else None


def read_rope(c: fields.ConfigJson, kind: str) -> Rope:
    """The rotary embedding of layers of this type."""
    every = c.get("rope_parameters") or ROPES
    if c.get("rope_scaling") or not isinstance(every.get(kind), dict):
        raise ValueError(
            f"rope_parameters of gemma4 models has an object for {kind}, and rope_scaling is not "
            "read; write the entries of each type of layers into rope_parameters"
        )
    found = dict(every[kind])
    if found.get("rope_type", "default") != PROPORTIONAL:
        rope = rotary.parse_rope(found, max_len=c["max_position_embeddings"])
        if rope.kind != "default":
            raise ValueError(
                f"rope_type {rope.kind!r} of {kind} is not supported in gemma4 models; supported: "
                f"default, {PROPORTIONAL}"
            )
        return rope
    share, factor = found.pop("partial_rotary_factor", 1.0), found.pop("factor", 1.0)
    plain = rotary.parse_rope(found | dict(rope_type="default"), max_len=0)
    return Rope(plain.theta, PROPORTIONAL, factor=float(factor), share=float(share))


def shared_layers(types: list[str], n_shared: int) -> list[SharedKV | None]:
    """The part of each layer in sharing keys and values.

    The last `n_shared` layers use those of the last layer of their type before them.
    """
    first = len(types) - n_shared
    if n_shared and (first < 1 or set(types[:first]) != set(types)):
        raise ValueError(
            f"num_kv_shared_layers={n_shared} leaves no layer of each type with keys and values "
            f"among {len(types)} layers"
        )
    source = {kind: i for i, kind in enumerate(types[:first])}
    used = {source[kind] for kind in types[first:]}
    own = [SharedKV(i, reads=False) if i in used else None for i in range(first)]
    return own + [SharedKV(source[kind], reads=True) for kind in types[first:]]


def feed_forward(c: fields.ConfigJson, act: str, reads_kv: bool) -> MLPConfig | MoEConfig:
    """The MLP, or the experts next to it."""
    F = c["intermediate_size"] * (2 if c["use_double_wide_mlp"] and reads_kv else 1)
    if not c["enable_moe_block"]:
        return MLPConfig(F, act)
    return MoEConfig(
        c["num_experts"],
        RouterConfig(c["top_k_experts"], learned_scales=True),
        c["moe_intermediate_size"],
        act,
        shared_F=F,
        shared_gate=False,
        shared_name="mlp",
        names="gemma4",
        norms=EXPERT_NORMS,
    )


def text_part(config: fields.ConfigJson) -> fields.ConfigJson:
    """`entries.language_part`."""
    return entries.language_part(config, IMAGE_ENTRIES, "gemma4", tied=True)


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "gemma4_text", "Gemma4ForCausalLM")
    del base["rope_theta"], base["rope_scaling"]
    mixers = cfg.attention_layers
    last = mixers[-1]  # a global layer
    local = next((mixer for mixer in mixers if mixer.window), last)
    ropes = {rotary.LOCAL: local.rope, rotary.GLOBAL: last.rope}
    return base | dict(
        hidden_activation=base.pop("hidden_act"),
        num_key_value_heads=local.K,
        head_dim=local.H,
        global_head_dim=last.H,
        num_global_key_value_heads=last.K if last.k_eq_v else None,
        attention_k_eq_v=last.k_eq_v,
        attention_bias=last.qkv_bias,
        sliding_window=fields.largest_window(cfg) or DEFAULTS["sliding_window"],
        layer_types=fields.layer_types(cfg),
        rope_parameters={kind: rope_json(rope) for kind, rope in ropes.items()},
        final_logit_softcapping=cfg.logit_softcap,
        hidden_size_per_layer_input=cfg.input_P,
        vocab_size_per_layer_input=cfg.input_V or cfg.V,
        **(dict(pad_token_id=cfg.input_pad) if cfg.input_P else {}),
        use_bidirectional_attention="vision" if local.whole_images else None,
        num_kv_shared_layers=sum(mixer.reads_kv for mixer in mixers),
        use_double_wide_mlp=cfg.layers[-1].ffn.dense_features > cfg.layers[0].ffn.dense_features,
        **experts_json(cfg),
    )


def rope_json(rope: Rope) -> dict[str, Any]:
    """The inverse of `read_rope`."""
    if rope.kind != PROPORTIONAL:
        return rotary.parameters_json(rope)
    found = dict(rope_theta=rope.theta, rope_type=rope.kind, partial_rotary_factor=rope.share)
    return found | ({} if rope.factor == 1 else dict(factor=rope.factor))


def experts_json(cfg: DecoderConfig) -> dict[str, Any]:
    if not cfg.expert_layers:
        return dict(enable_moe_block=False)
    ffn = cfg.expert_layers[0]
    return dict(
        enable_moe_block=True,
        num_experts=ffn.E,
        top_k_experts=ffn.top_k,
        moe_intermediate_size=ffn.F,
    )
