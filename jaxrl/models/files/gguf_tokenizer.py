"""Tokenizer and chat template of a GGUF file -> tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def special_ids(meta: dict[str, Any]) -> dict[str, int]:
    """bos_token_id, eos_token_id and pad_token_id, those that the file sets."""
    ids = {name: meta.get(f"tokenizer.ggml.{SPECIAL[name]}_token_id") for name in SPECIAL}
    return {f"{name}_token_id": i for name, i in ids.items() if i is not None and name != "unk"}


def write_tokenizer(meta: dict[str, Any], folder: Path, path: Path, *, max_len: int) -> None:
    """Writes both tokenizer files. Raises ValueError for tokenizers other than GPT-2's BPE."""
    model, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in ("gpt-2", "smollm"):
        raise ValueError(
            f"{path} has the tokenizer {model!r}/{pre!r}; only 'gpt2' with 'gpt-2' or 'smollm' is "
            "supported in GGUF files: use the safetensors version of this model"
        )
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    named = list(zip(tokens, kinds, strict=True))
    special = [t for t, kind in named if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in named if k == USER_DEFINED])
    tokenizer.save(str(folder / "tokenizer.json"))

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": special,
    }
    for name, gguf_name in SPECIAL.items():
        if (i := meta.get(f"tokenizer.ggml.{gguf_name}_token_id")) is not None:
            config[f"{name}_token"] = tokens[i]
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n")


def pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """GPT-2's word splitting; SmolLM splits numbers into digits first."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words
