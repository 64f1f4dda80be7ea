"""Writes a GGUF file of the golden Llama with a tiny tokenizer."""

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parents[1] / "golden"
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def pairs(w: np.ndarray, n_heads: int) -> np.ndarray:
    """Hugging Face's order of a head's rows -> llama.cpp's: row i next to row i + H/2."""
    H = w.shape[0] // n_heads
    order = [
        n * H + i + half * H // 2 for n in range(n_heads) for i in range(H // 2) for half in (0, 1)
    ]
    return w[order]


def write_gguf(path: Path, *, arch: str = "llama", pre: str = "smollm") -> None:
    """The golden Llama as a GGUF file with a byte-level tokenizer of 256 tokens."""
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    w = load_file(GOLDEN / "llama" / "model.safetensors")
    file = gguf.GGUFWriter(path, arch)
    file.add_block_count(2)
    file.add_context_length(128)
    file.add_embedding_length(32)
    file.add_feed_forward_length(48)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(pre)
    tokens = ["<pad>", "<bos>", "<eos>", *ALPHABET[:251], "at", "cat"]
    file.add_token_list(tokens)
    file.add_token_types([3] * 3 + [1] * 253)
    file.add_token_merges(["a t", "c at"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_pad_token_id(0)
    file.add_chat_template("{% for m in messages %}<bos>{{ m['content'] }}<eos>{% endfor %}")
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": 4, "attn_k": 2}
    file.add_tensor("token_embd.weight", w["model.embed_tokens.weight"])
    file.add_tensor("output_norm.weight", w["model.norm.weight"])
    file.add_tensor("output.weight", w["lm_head.weight"])
    for layer in range(2):
        for theirs, ours in names.items():
            value = w[f"model.layers.{layer}.{ours}.weight"]
            if theirs in heads:
                value = pairs(value, heads[theirs])
            file.add_tensor(f"blk.{layer}.{theirs}.weight", value)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
