"""Gemma 3, text (https://arxiv.org/abs/2503.19786).

Five local layers per global one, each kind with its own rotary base; queries and keys are
normalized per head.
"""

from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import entries, fields, gemma2, rotary
from jaxrl.models.rope_config import Rope

ENTRIES = entries.Entries(
    classes=("Gemma3", "Gemma3Text"),
    read=gemma2.READ | {"rope_local_base_freq", "sliding_window_pattern"},
    neutral=frozenset({"hidden_act", "_sliding_window_pattern"}),
)
# The top level of an image-and-text model; its language model is in text_config.
IMAGE_ENTRIES = entries.Entries(
    classes=("Gemma3",),
    read=frozenset(
        {"model_type", "architectures", "auto_map", "text_config", "tie_word_embeddings"}
    ),
    neutral=frozenset(
        {
            "vision_config",
            "mm_tokens_per_image",
            *(f"{name}_token_{end}" for name in ("boi", "eoi", "image") for end in ("index", "id")),
        }
    ),
)
# transformers' defaults for keys absent from config.json.
DEFAULTS: dict[str, Any] = gemma2.DEFAULTS | dict(
    vocab_size=262_208,
    max_position_embeddings=131_072,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
)


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    """Raises ValueError for capped scores, which transformers does not compute."""
    c = DEFAULTS | dict(c)
    if (cap := c["attn_logit_softcapping"]) is not None:
        raise ValueError(
            f"attn_logit_softcapping is {cap}, which transformers ignores in gemma3 models; "
            "remove it from config.json"
        )
    rope, local = rotary.read_layer_ropes(c, "gemma3", theta=1_000_000.0, local_theta=10_000.0)
    period = 1 if c.get("layer_types") else fields.read_period(c, 6)
    return gemma2.gemma_config(
        c,
        "gemma3",
        period=period,
        rope=rope,
        local_rope=local,
        qk_norm=True,
        whole_images=True,
    )


def text_part(config: fields.ConfigJson) -> fields.ConfigJson:
    """`entries.language_part`, which has no cap of the logits: transformers would ignore it."""
    text = entries.language_part(config, IMAGE_ENTRIES, "gemma3", tied=True)
    if (cap := text.get("final_logit_softcapping")) is not None:
        raise ValueError(
            f"final_logit_softcapping is {cap}, which transformers ignores in image-and-text "
            "models; remove it from text_config"
        )
    return text


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    by_type = {rotary.GLOBAL: fields.global_rope(cfg), rotary.LOCAL: local_rope(cfg)}
    local = by_type[rotary.LOCAL]
    base = gemma2.gemma_json(cfg, "gemma3_text", "Gemma3ForCausalLM")
    base |= dict(rope_local_base_freq=local.theta)
    if local.kind == "default":
        return base
    # Only the newer entry has a scaling of the local layers.
    parameters = {name: rotary.parameters_json(rope) for name, rope in by_type.items()}
    return base | dict(rope_parameters=parameters)


def local_rope(cfg: DecoderConfig) -> Rope:
    """The rotary embedding of layers with a window; of all layers if none has one."""
    mixers = cfg.attention_layers
    return next((mixer.rope for mixer in mixers if mixer.window), mixers[0].rope)
