"""Tokenizer and chat template of a GGUF file -> tokenizer.json and tokenizer_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxrl.models.files.gguf.reader import GgufValue, entry

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def special_ids(meta: Mapping[str, GgufValue], path: Path, vocab: int) -> dict[str, int]:
    """bos_token_id, eos_token_id and pad_token_id, those that the file sets."""
    found = {}
    for name, gguf_name in SPECIAL.items():
        i = entry(meta, f"tokenizer.ggml.{gguf_name}_token_id", int, path, -1)
        if i >= vocab:
            raise ValueError(f"{path} has the {gguf_name} token {i} of {vocab} tokens")
        if i >= 0:
            found[name] = i
    return {f"{name}_token_id": i for name, i in found.items() if name != "unk"}


def write_tokenizer(
    meta: Mapping[str, GgufValue], folder: Path, path: Path, *, max_len: int
) -> None:
    """Writes both tokenizer files.

    Raises ValueError for tokenizers other than GPT-2's BPE and for malformed vocabularies.
    """
    model = entry(meta, "tokenizer.ggml.model", str, path)
    pre = entry(meta, "tokenizer.ggml.pre", str, path, "gpt-2")
    if model != "gpt2" or pre not in ("gpt-2", "smollm"):
        raise ValueError(
            f"{path} has the tokenizer {model[:80]!r}/{pre[:80]!r}; only 'gpt2' with 'gpt-2' or "
            "'smollm' is supported in GGUF files: use the safetensors version of this model"
        )
    tokens = entry(meta, "tokenizer.ggml.tokens", list, path)
    special = save_tokenizer(meta, tokens, folder / "tokenizer.json", path, pre)

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": special,
    }
    for name, gguf_name in SPECIAL.items():
        if (i := entry(meta, f"tokenizer.ggml.{gguf_name}_token_id", int, path, -1)) >= 0:
            config[f"{name}_token"] = tokens[i]
    if template := entry(meta, "tokenizer.chat_template", str, path, ""):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n")


def save_tokenizer(
    meta: Mapping[str, GgufValue], tokens: list[str], target: Path, path: Path, pre: str
) -> list[str]:
    """Writes tokenizer.json. Returns the special tokens."""
    merges = [tuple(m.split(" ")) for m in entry(meta, "tokenizer.ggml.merges", list, path)]
    kinds = meta.get("tokenizer.ggml.token_type")
    try:
        if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
            raise ValueError("tokenizer.ggml.token_type is not an array of one number per token")
        if len(set(tokens)) != len(tokens) or any(len(merge) != 2 for merge in merges):
            raise ValueError("tokens occur twice, or merges are not of two tokens")
        vocab = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # tokenizers raises Exception
        raise ValueError(
            f"{path} has a malformed tokenizer ({str(error)[:300]}); download it again"
        ) from error
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    named = list(zip(tokens, kinds, strict=True))
    special = [t for t, kind in named if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in named if k == USER_DEFINED])
    tokenizer.save(str(target))
    return special


def pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """GPT-2's word splitting; SmolLM splits numbers into digits first."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words
