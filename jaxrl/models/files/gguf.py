"""GGUF files of the Llama architecture -> Hugging Face folder.

Converts weights (dequantized), config, tokenizer and chat template. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxrl.models.config import DecoderConfig, Rope
from jaxrl.models.files.atomic_folder import write_json
from jaxrl.models.files.gguf_tokenizer import special_ids, write_tokenizer
from jaxrl.models.files.hf_config import config_to_hf
from jaxrl.models.files.safetensors import write_tensors

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, folder: Path, *, dtype: DTypeLike = np.float32) -> None:
    """Fills `folder` with a Hugging Face checkpoint of the model in the GGUF file at `path`.

    Tensors are dequantized and written one at a time. Raises ValueError for architectures,
    tokenizers and rotary scalings other than those of Llama and SmolLM.
    """
    try:
        from gguf import GGUFReader  # an extra: only GGUF files need it
    except ImportError as error:
        raise ValueError(
            f"reading {path} needs the package gguf; install jaxrl with the extra 'gguf'"
        ) from error
    reader = GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {hf_name(tensor.name, path): tensor for tensor in reader.tensors}
    cfg = gguf_config(meta, path, tied="lm_head.weight" not in tensors)
    shapes = {
        name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()
    }

    ids = special_ids(meta)
    dtype = np.dtype(dtype)
    config = config_to_hf(cfg) | ids | {"torch_dtype": str(dtype)}
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(meta, folder, path, max_len=cfg.max_len)
    layout = {name: (dtype, shape) for name, shape in shapes.items()}
    write_tensors(folder / "model.safetensors", layout, weights(tensors, shapes, cfg, dtype))
    write_json(folder / "config.json", config)


def hf_name(name: str, path: Path) -> str:
    """The Hugging Face name of a GGUF tensor."""
    if name in TOP:
        return TOP[name]
    kind, *rest = name.split(".")
    if kind == "blk" and len(rest) == 3 and rest[1] in LAYER:
        layer, part, suffix = rest
        return f"model.layers.{layer}.{LAYER[part]}.{suffix}"
    raise ValueError(
        f"{path} contains the tensor {name!r}, which a plain Llama model does not have; "
        f"use the safetensors version of this model"
    )


def gguf_config(meta: dict[str, Any], path: Path, *, tied: bool) -> DecoderConfig:
    """The decoder described by the file's metadata."""
    if (arch := meta["general.architecture"]) != "llama":
        raise ValueError(
            f"{path} has architecture {arch!r}, and only 'llama' is supported in GGUF files; "
            f"use the safetensors version of this model"
        )

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"llama.{key}", default)

    N, D = get("attention.head_count"), get("embedding_length")
    return DecoderConfig(
        family="llama",
        L=get("block_count"),
        D=D,
        N=N,
        K=get("attention.head_count_kv", N),
        H=get("attention.key_length", D // N),
        F=get("feed_forward_length"),
        V=len(meta["tokenizer.ggml.tokens"]),
        norm_eps=shortest_decimal(get("attention.layer_norm_rms_epsilon")),
        rope=gguf_rope(get, path),
        tied=tied,
        max_len=get("context_length"),
    )


def gguf_rope(get: Any, path: Path) -> Rope:
    theta, kind = (
        shortest_decimal(get("rope.freq_base", 10_000.0)),
        get("rope.scaling.type", "none"),
    )
    if kind == "none":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=shortest_decimal(get("rope.scaling.factor")))
    raise ValueError(
        f"{path} has the rotary scaling {kind!r}, which is not supported in GGUF files; "
        f"use the safetensors version of this model"
    )


def shortest_decimal(value: float) -> float:
    """The shortest decimal that rounds to this float32: 9.99999974e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def weights(
    tensors: dict, shapes: dict, cfg: DecoderConfig, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """The dequantized tensors in the order of `tensors`."""
    from gguf import dequantize  # an extra: only GGUF files need it

    heads = {"self_attn.q_proj": cfg.N, "self_attn.k_proj": cfg.K}
    for name, tensor in tensors.items():
        w = dequantize(tensor.data, tensor.tensor_type).reshape(shapes[name])
        for part, n_heads in heads.items():
            if part in name:
                w = unpermute(w, n_heads)
        yield w.astype(dtype, copy=False)


def unpermute(w: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of each head reordered from llama.cpp's adjacent pairs to Hugging Face's halves."""
    pairs = w.reshape(n_heads, w.shape[0] // n_heads // 2, 2, *w.shape[1:])
    return pairs.swapaxes(1, 2).reshape(w.shape)
