"""config.json of a Hugging Face folder <-> DecoderConfig."""

import dataclasses
import difflib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.json_text import read_object
from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import (
    cohere2,
    deepseek,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gemma4_unified,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    lfm2,
    llama,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    muse_glimmer,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    seed_oss,
    smollm3,
    starcoder2,
)
from jaxrl.models.families.entries import Entries, check_known, unknown_entries
from jaxrl.models.files.hf_entries import check_decoder, check_entries
from jaxrl.models.files.quantized.scheme import read_scheme, without_scheme
from jaxrl.models.files.weight_files import has_separate_head

# A new family is a file in families/ and an entry here. Keys are `DecoderConfig.family`.
FAMILIES = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
    "qwen3_moe": qwen3_moe,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_next": qwen3_next,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "glm4_moe_lite": glm4_moe_lite,
    "deepseek_v3": deepseek,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "phi3": phi3,
    "glm4": glm4,
    "smollm3": smollm3,
    "granite": granite,
    "gemma": gemma,
    "seed_oss": seed_oss,
    "ministral3": ministral3,
    "cohere2": cohere2,
    "qwen2_moe": qwen2_moe,
    "exaone4": exaone4,
    "starcoder2": starcoder2,
    "lfm2": lfm2,
    "muse_glimmer": muse_glimmer,
    "qwen3_vl": qwen3_vl,
    "qwen2_5_vl": qwen2_5_vl,
}
# The top level of an image-and-text model whose family has no such form here.
TOP_ENTRIES = Entries(
    classes=(), read=frozenset({"model_type", "architectures", "auto_map", "text_config"})
)
ADVICE = "use the model's own config.json"
# `model_type` in config.json -> family.
MODEL_TYPES = {name: name for name in FAMILIES} | {
    "gemma3_text": "gemma3",
    "kimi_k2": "deepseek_v3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4_unified",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "muse_glimmer_text": "muse_glimmer",
    "qwen3_vl_text": "qwen3_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
}
# Model types whose language model is a part, and the modules that find it.
IMAGE_AND_TEXT = {
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "mistral3": mistral3,
    "muse_glimmer": muse_glimmer,
    "qwen3_vl": qwen3_vl,
    "qwen2_5_vl": qwen2_5_vl,
}


def folder_config(folder: str | Path) -> DecoderConfig:
    """The decoder of a model folder. Raises ValueError if its config.json is missing or wrong."""
    return read_decoder_config(config_path(folder))


def config_path(folder: str | Path) -> Path:
    """config.json of a model folder. Raises ValueError if there is none."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise ValueError(
            f"{folder} has no config.json; config.model.path must name a Hugging Face model folder"
        )
    return path


def read_decoder_config(path: Path) -> DecoderConfig:
    """The decoder of the config.json at `path`, untied if the weights next to it are.

    Raises ValueError with the file's name.
    """
    config = read_object(path, ADVICE)
    try:
        cfg = config_from_hf(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return dataclasses.replace(cfg, tied=cfg.tied and not has_separate_head(path.parent))


def config_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes; for an image-and-text model, its text part.

    Raises ValueError for unknown model types, activations and rope scalings, for entries of
    another type or of implausible size, and for those that may change the numbers and are not read.
    """
    model_type = str(config.get("model_type"))
    if model_type not in MODEL_TYPES.keys() | IMAGE_AND_TEXT:
        raise ValueError(unknown_type(config))
    check_entries(config)
    read_scheme(config)
    text = without_scheme(config)
    if module := IMAGE_AND_TEXT.get(model_type):
        text = module.text_part(text)
    family = MODEL_TYPES[text["model_type"]]
    check_known(text, FAMILIES[family].ENTRIES, model_type)
    try:
        cfg = FAMILIES[family].from_hf(text)
    except KeyError as error:
        raise ValueError(f"config.json of a {model_type} model lacks {error}") from error
    check_decoder(cfg)
    return cfg


def unknown_type(config: Mapping[str, Any]) -> str:
    """The error of an unknown model type: the nearest family, and what that does not know."""
    model_type, text = str(config.get("model_type")), config.get("text_config")
    top, text = (config, text) if text and isinstance(text, dict) else ({}, config)
    nearest = nearest_type(model_type, text)
    family = MODEL_TYPES[nearest]
    image = IMAGE_AND_TEXT[family].IMAGE_ENTRIES if family in IMAGE_AND_TEXT else TOP_ENTRIES
    unread = unknown_entries(text, FAMILIES[family].ENTRIES) + unknown_entries(top, image)
    known = ", ".join(sorted(MODEL_TYPES.keys() | IMAGE_AND_TEXT))
    differs = f"fields that it does not know: {', '.join(unread)}"
    return (
        f"model_type {config.get('model_type')!r} is not known; known: {known}. The nearest is "
        f"{nearest}; {differs if unread else 'it has the same fields but may compute otherwise'}"
    )


def nearest_type(model_type: str, config: Mapping[str, Any]) -> str:
    """The known type that knows most of the fields, of those with a similar name if there are any.

    Similar names begin with the same letters, or else differ in few of them.
    """
    letters = "".join(itertools.takewhile(str.isalpha, model_type))
    same = [name for name in MODEL_TYPES if name.startswith(letters)]
    similar = same or difflib.get_close_matches(model_type, MODEL_TYPES, cutoff=0.6)

    def distance(name: str) -> tuple[int, float]:
        unread = unknown_entries(config, FAMILIES[MODEL_TYPES[name]].ENTRIES)
        return len(unread), -difflib.SequenceMatcher(None, model_type, name).ratio()

    return min(similar or MODEL_TYPES, key=distance)


def config_to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json from which `config_from_hf` reads `cfg`, except heads and layer layout."""
    return FAMILIES[cfg.family].to_hf(cfg) | classifier_json(cfg)


def classifier_json(cfg: DecoderConfig) -> dict[str, Any]:
    """Entries that select transformers' classifier, for a model without logits."""
    if "vocab" in cfg.heads:
        return {}
    (architecture,) = FAMILIES[cfg.family].to_hf(cfg)["architectures"]
    name = architecture.removesuffix("ForCausalLM")
    name = {"Gemma3": "Gemma3Text"}.get(name, name)  # the class "Gemma3..." includes images
    labels = dict(
        id2label={str(i): label for i, label in enumerate(cfg.labels)},
        label2id={label: i for i, label in enumerate(cfg.labels)},
    )
    return dict(architectures=[f"{name}ForSequenceClassification"], **labels)


def same_model(a: DecoderConfig, b: DecoderConfig) -> bool:
    """Whether configs differ only in fields that a model's files do not store.

    These are heads and their labels, adapters, layer layout, kernels, and whether the vision tower
    is trained.
    """
    names = ("heads", "labels", "lora", "base_dtype", "tower")
    names = (*names, "stacked", "grouped_matmul", "gated_delta")
    not_in_files = {name: getattr(b, name) for name in names}
    return dataclasses.replace(a, **not_in_files) == b
