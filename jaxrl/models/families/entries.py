"""Entries of config.json: those that a family reads, and those without effect on its numbers.

Every other entry is refused, unless it is off (null, false, 0 or empty). An entry that a future
version of transformers adds is therefore refused until a table here names it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.json_text import shown

SIZES = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
    }
)
ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"})
READ = (
    SIZES
    | ROPE
    | {"model_type", "architectures", "auto_map", "rms_norm_eps", "tie_word_embeddings"}
)
LATER_LEN = frozenset({"original_max_position_embeddings"})  # top level: of yarn and llama3
WINDOWS = frozenset({"sliding_window", "layer_types"})
QWEN_WINDOWS = WINDOWS | {"use_sliding_window", "max_window_layers"}

# Neutral at any value, by the reason.
NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "dtype of the files; `model.dtype` is the one of a run": ("dtype", "torch_dtype"),
    "tokens and text, from the tokenizer's files": (
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("tokenizer_class", "model_max_length", "max_sequence_length", "prefix"),
    ),
    "sampling, from generation_config.json": (
        *("assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids"),
        *("begin_suppress_tokens", "cache_implementation", "diversity_penalty", "do_sample"),
        *("early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
        *("epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
        *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length"),
        *("max_new_tokens", "min_length", "min_p", "no_repeat_ngram_size", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences"),
        *("output_scores", "remove_invalid_values", "repetition_penalty"),
        *("return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature"),
        *("top_k", "top_p", "typical_p", "use_cache"),
    ),
    "labels of a classifier; the shape of score.weight counts": (
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
        "task_specific_params",
    ),
    "start of a training from random weights": ("initializer_range",),
    "outputs and execution in transformers": (
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        *("_experts_implementation", "chunk_size_feed_forward", "is_decoder", "output_attentions"),
        *("output_hidden_states", "pretraining_tp", "return_dict", "tf_legacy_loss", "torchscript"),
        *("trust_remote_code", "use_bfloat16"),
    ),
    "notes of the programs that wrote the file": (
        *("_commit_hash", "_name_or_path", "name_or_path", "transformers_version"),
        *("transformers.js_config", "is_llama_config", "unsloth_fixed", "unsloth_version"),
    ),
}
WITHOUT_EFFECT = frozenset(name for names in NEUTRAL.values() for name in names)
# Neutral at these values only; null is neutral too.
NEUTRAL_AT: Mapping[str, tuple[Any, ...]] = {
    "activation": ("swiglu",),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "causal": (True,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "use_rope": (True,),
}


@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries of config.json that one family reads."""

    classes: tuple[str, ...]  # names of its classes in transformers, without "ForCausalLM"
    read: frozenset[str]
    neutral: frozenset[str] = frozenset()  # at any value
    neutral_at: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    code: frozenset[str] = frozenset()  # values of auto_map that name the standard architecture


def is_off(value: Any) -> bool:
    """Whether a value switches a feature off: null, false, 0 or empty."""
    return value is None or value in (False, 0, "", [], {})


def unknown_entries(config: Mapping[str, Any], entries: Entries) -> list[str]:
    """The entries that are on and that a family does not know."""
    known = entries.read | entries.neutral | WITHOUT_EFFECT | NEUTRAL_AT.keys()
    return sorted(
        name
        for name, value in config.items()
        if name not in known | entries.neutral_at.keys() and not is_off(value)
    )


def check_known(config: Mapping[str, Any], entries: Entries, model_type: str) -> None:
    """Raises ValueError for the first entry that may change the numbers and is not read."""
    check_architectures(config, entries.classes, model_type)
    check_no_code(config, entries.code)
    neutral_at = {**NEUTRAL_AT, **entries.neutral_at}
    for name, value in config.items():
        if name in entries.read | entries.neutral | WITHOUT_EFFECT or value is None:
            continue
        if name in neutral_at:
            if value in neutral_at[name]:
                continue
            values = " or ".join(str(known) for known in neutral_at[name])
            raise ValueError(
                f"{name} is {shown(value)}, and for {model_type} models only {values} is "
                "supported; set it in config.json if the weights may be used so"
            )
        if not is_off(value):
            raise ValueError(
                f"{name} is {shown(value)}, which is not known for {model_type} models and may "
                "change their numbers; remove it from config.json if it has no effect on them"
            )


def check_architectures(
    config: Mapping[str, Any], classes: tuple[str, ...], model_type: str
) -> None:
    """Raises ValueError unless `architectures` names language models or classifiers."""
    heads = ("ForCausalLM", "ForSequenceClassification", "ForConditionalGeneration", "Model")
    known = {name + head for name in classes for head in heads}
    found = config.get("architectures") or []
    if not isinstance(found, list) or {str(name).removeprefix("FSDP") for name in found} - known:
        raise ValueError(
            f"architectures is {shown(found)}, and of {model_type} models "
            f"{classes[0]}ForCausalLM and {classes[-1]}ForSequenceClassification are supported; "
            "use a model of these classes"
        )


def check_no_code(config: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises ValueError if the model is a class in a file of its folder (`auto_map`).

    `known` are classes with the numbers of transformers' class.
    """
    found = config.get("auto_map") or {}
    names = found if isinstance(found, dict) else {"AutoModel": found}
    models = {name: code for name, code in names.items() if name.startswith("AutoModel")}
    if models and not known.issuperset(map(str, models.values())):
        raise ValueError(
            f"auto_map names code of the model, {shown(models)}, and code of a model folder is "
            "not run; remove auto_map from config.json if the model has the standard architecture"
        )


def language_part(
    config: Mapping[str, Any],
    known: Entries,
    model_type: str,
    *,
    tied: bool,
    text_types: Sequence[str] = (),
) -> Mapping[str, Any]:
    """The language model of an image-and-text model (its `text_config`) as a text model's config.

    The embedding is tied by the entry of the top level, as in transformers; `tied` is its default.
    The part has one of `text_types`, by default the first, or by default `{model_type}_text`.
    Raises ValueError for a missing part, another type, and entries that are not `known`.
    """
    check_known(config, known, model_type)
    text, types = config.get("text_config"), text_types or (f"{model_type}_text",)
    shown_types = " or ".join(types)
    if not text:
        raise ValueError(f"text_config is missing; the model_type of a text model is {shown_types}")
    if (found := text.get("model_type", types[0])) not in types:
        raise ValueError(f"model_type of text_config is {found!r}; {shown_types} is supported")
    tied = config.get("tie_word_embeddings", tied)
    if (found := text.get("tie_word_embeddings", tied)) != tied:
        raise ValueError(
            f"tie_word_embeddings is {tied} and {found} in text_config; set both to the same"
        )
    return {**text, "model_type": text.get("model_type", types[0]), "tie_word_embeddings": tied}
