"""The special tokens of model families, and folders with their tokenizer and chat template.

templates/ has a small template per family, written for these tests: the same roles, markers, order
and special cases as the family's, without its long texts.
"""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATES = Path(__file__).parent / "templates"
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
FAMILIES = {  # beginning of sequence, then the tokens that end a response
    "deepseek_v3": DEEPSEEK,
    "gemma2": ("<bos>", "<end_of_turn>", "<eos>"),
    "gemma3": ("<bos>", "<end_of_turn>", "<eos>"),
    "glm4": ("", "<|endoftext|>", "<|user|>", "<|observation|>"),
    "granite3": ("", "<|end_of_text|>"),
    "harmony": ("", "<|return|>", "<|call|>"),
    "llama2": ("<s>", "</s>"),
    "llama3_1": ("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"),
    "llama3_2": ("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"),
    "llama3_3": ("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"),
    "mistral_nemo": ("<s>", "</s>"),
    "mistral_v0_1": ("<s>", "</s>"),
    "mistral_v0_3": ("<s>", "</s>"),
    "mixtral": ("<s>", "</s>"),
    "olmo2": ("<|endoftext|>", "<|endoftext|>"),
    "phi3": ("", "<|endoftext|>", "<|end|>"),
    "phi4": ("", "<|im_end|>", "<|endoftext|>"),
    "qwen2_5": ("", "<|im_end|>", "<|endoftext|>"),
    "qwen3": ("", "<|im_end|>", "<|endoftext|>"),
    "qwq": ("", "<|im_end|>", "<|endoftext|>"),
    "r1_distill": DEEPSEEK,
    "r1_distill_january": DEEPSEEK,
    "smollm2": ("", "<|im_end|>"),
    "smollm3": ("", "<|im_end|>"),
    "yi": ("", "<|im_end|>", "<|endoftext|>"),
}
MARKERS = (
    "<|im_start|>", "<|im_sep|>", "<|assistant|>", "<|start|>", "<|channel|>", "<|message|>",
    "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<think>", "</think>",
    "<|start_of_role|>", "<|end_of_role|>", "<｜User｜>", "<｜Assistant｜>", "[INST]", "[/INST]",
)  # fmt: skip


def vocabulary() -> Tokenizer:
    """A byte-level tokenizer with the special tokens of all families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted({*MARKERS, *sum(FAMILIES.values(), ())} - {""}))
    return tokenizer


def write_tokenizer(folder: Path, family: str) -> Path:
    """Writes the tokenizer, the chat template and the stop tokens of a family; returns `folder`."""
    tokenizer = vocabulary()
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(TEMPLATES / f"{family}.jinja", folder / "chat_template.jinja")
    bos, *ends = FAMILIES[family]
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0]}
    names |= {"bos_token": bos} if bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    ids = [tokenizer.token_to_id(end) for end in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
