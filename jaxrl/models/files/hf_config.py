"""config.json of a Hugging Face folder <-> DecoderConfig."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import (
    gemma2,
    gemma3,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)

# A new family is a file in families/ and an entry here. Keys are `DecoderConfig.family`.
FAMILIES = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
}
# `model_type` in config.json -> family.
MODEL_TYPES = {name: name for name in FAMILIES} | {"gemma3_text": "gemma3"}


def config_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes; for an image-and-text model, its text part.

    Raises ValueError for unknown model types, activations and rope scalings.
    """
    model_type = config.get("model_type")
    family = MODEL_TYPES.get(str(model_type))
    if family is None:
        raise ValueError(
            f"model_type {model_type!r} is not known; known: {', '.join(sorted(MODEL_TYPES))}"
        )
    if config.get("quantization_config"):
        raise ValueError(
            "the checkpoint is quantized (quantization_config in config.json); "
            "use its unquantized version"
        )
    text = config.get("text_config")
    try:
        return FAMILIES[family].from_hf(config if text is None else text)
    except KeyError as error:
        raise ValueError(f"config.json of a {model_type} model lacks {error}") from error


def config_to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json from which `config_from_hf` reads `cfg`, except heads and layer layout."""
    return FAMILIES[cfg.family].to_hf(cfg) | classifier_json(cfg)


def classifier_json(cfg: DecoderConfig) -> dict[str, Any]:
    """Entries that select transformers' one-label classifier, for a model without logits."""
    if "vocab" in cfg.heads:
        return {}
    (architecture,) = FAMILIES[cfg.family].to_hf(cfg)["architectures"]
    name = architecture.removesuffix("ForCausalLM")
    name = {"Gemma3": "Gemma3Text"}.get(name, name)  # the class "Gemma3..." includes images
    labels = dict(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    return dict(architectures=[f"{name}ForSequenceClassification"], **labels)


def same_model(a: DecoderConfig, b: DecoderConfig) -> bool:
    """Whether configs differ only in fields that no file stores: heads, layer layout, kernels."""
    not_in_files = dict(heads=b.heads, stacked=b.stacked, grouped_matmul=b.grouped_matmul)
    return dataclasses.replace(a, **not_in_files) == b
