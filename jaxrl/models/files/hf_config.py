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

# A new family is a file in families/ and a line here. Keys are `DecoderConfig.family`.
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
# `model_type` in config.json, where it is not the family's name.
MODEL_TYPES = {name: name for name in FAMILIES} | {"gemma3_text": "gemma3"}


def config_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes; of an image-and-text model its text part.

    Raises ValueError for model types, activations and rope scalings that are not known.
    """
    model_type = config.get("model_type")
    family = MODEL_TYPES.get(str(model_type))
    if family is None:
        raise ValueError(
            f"model_type {model_type!r} is not known; known: {', '.join(sorted(MODEL_TYPES))}"
        )
    if config.get("quantization_config"):
        raise ValueError(
            "the checkpoint is quantised (quantization_config in config.json); "
            "use its unquantised version"
        )
    text = config.get("text_config")
    try:
        return FAMILIES[family].from_hf(config if text is None else text)
    except KeyError as error:
        raise ValueError(f"config.json of a {model_type} model lacks {error}") from error


def config_to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json from which `config_from_hf` reads `cfg` again, heads and layer layout apart."""
    return FAMILIES[cfg.family].to_hf(cfg) | head_json(cfg)


def head_json(cfg: DecoderConfig) -> dict[str, Any]:
    """By which transformers finds the class of a model without logits: a classifier with one label."""
    if "vocab" in cfg.heads:
        return {}
    (architecture,) = FAMILIES[cfg.family].to_hf(cfg)["architectures"]
    name = architecture.removesuffix("ForCausalLM")
    name = {"Gemma3": "Gemma3Text"}.get(name, name)  # the class of that name reads images, too
    labels = dict(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    return dict(architectures=[f"{name}ForSequenceClassification"], **labels)


def same_model(a: DecoderConfig, b: DecoderConfig) -> bool:
    """Whether two configs differ at most in what no file says: heads, layout of the layers, kernels."""
    unsaid = dict(heads=b.heads, stacked=b.stacked, grouped_matmul=b.grouped_matmul)
    return dataclasses.replace(a, **unsaid) == b
