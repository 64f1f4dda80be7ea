"""GGUF files of the Llama architecture -> Hugging Face folder.

Converts weights (dequantized), config, tokenizer and chat template. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from jaxrl.config.packages import install_advice
from jaxrl.models.config import DecoderConfig, uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.atomic_folder import write_json
from jaxrl.models.files.gguf.reader import (
    GgufFile,
    GgufTensor,
    GgufValue,
    check_tensor,
    dequantized,
    entry,
    read_gguf,
)
from jaxrl.models.files.gguf.tokenizer import special_ids, write_tokenizer
from jaxrl.models.files.hf_config import config_from_hf, config_to_hf
from jaxrl.models.files.safetensors import write_tensors
from jaxrl.models.files.tensor_shapes import check_shapes
from jaxrl.models.rope_config import Rope

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

    Tensors are dequantized and written one at a time. Raises ValueError for malformed files, and
    for architectures, tokenizers and rotary scalings other than those of Llama and SmolLM.
    """
    try:
        import gguf  # noqa: F401  an extra: only GGUF files need it
    except ImportError as error:
        raise ValueError(
            f"reading {path} needs the package gguf; install it with {install_advice('gguf')}"
        ) from error
    file = read_gguf(path)
    tensors = {hf_name(name, path): tensor for name, tensor in file.tensors.items()}
    cfg = gguf_config(file.metadata, path, tied="lm_head.weight" not in tensors)
    for name, tensor in tensors.items():
        check_tensor(file, name, tensor, path)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_shapes(decoder_specs(cfg), shapes, f"the tensors in {path} do not match its metadata")

    ids = special_ids(file.metadata, path, cfg.V)
    dtype = np.dtype(dtype)
    config = config_to_hf(cfg) | ids | {"torch_dtype": str(dtype)}
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(file.metadata, folder, path, max_len=cfg.max_len)
    layout = {name: (dtype, shape) for name, shape in shapes.items()}
    write_tensors(folder / "model.safetensors", layout, weights(file, tensors, cfg, dtype))
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
        f"{path} contains the tensor {name[:80]!r}, which a plain Llama model does not have; "
        f"use the safetensors version of this model"
    )


def gguf_config(meta: Mapping[str, GgufValue], path: Path, *, tied: bool) -> DecoderConfig:
    """The decoder described by the file's metadata."""
    if (arch := entry(meta, "general.architecture", str, path)) != "llama":
        raise ValueError(
            f"{path} has architecture {arch[:80]!r}, and only 'llama' is supported in GGUF files; "
            f"use the safetensors version of this model"
        )

    def size(key: str, default: int | None = None) -> int:
        return entry(meta, f"llama.{key}", int, path, default)

    N, D = size("attention.head_count"), size("embedding_length")
    cfg = uniform_decoder(
        "llama",
        L=size("block_count"),
        D=D,
        N=N,
        K=size("attention.head_count_kv", N),
        H=size("attention.key_length", D // max(N, 1)),
        F=size("feed_forward_length"),
        V=len(entry(meta, "tokenizer.ggml.tokens", list, path)),
        norm_eps=number(meta, "llama.attention.layer_norm_rms_epsilon", path),
        rope=gguf_rope(meta, path),
        tied=tied,
        max_len=size("context_length"),
    )
    try:
        return config_from_hf(config_to_hf(cfg))  # checks the sizes
    except ValueError as error:
        raise ValueError(f"the metadata of {path} as config.json: {error}") from error


def gguf_rope(meta: Mapping[str, GgufValue], path: Path) -> Rope:
    theta = number(meta, "llama.rope.freq_base", path, 10_000.0)
    kind = entry(meta, "llama.rope.scaling.type", str, path, "none")
    if kind == "none":
        return Rope(theta=theta)
    if kind == "linear":
        factor = number(meta, "llama.rope.scaling.factor", path)
        return Rope(theta=theta, kind="linear", factor=factor)
    raise ValueError(
        f"{path} has the rotary scaling {kind[:80]!r}, which is not supported in GGUF files; "
        f"use the safetensors version of this model"
    )


def number(
    meta: Mapping[str, GgufValue], key: str, path: Path, default: float | None = None
) -> float:
    return shortest_decimal(entry(meta, key, float, path, default))


def shortest_decimal(value: float) -> float:
    """The shortest decimal that rounds to this float32: 9.99999974e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def weights(
    file: GgufFile, tensors: Mapping[str, GgufTensor], cfg: DecoderConfig, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """The dequantized tensors in the order of `tensors`."""
    mixer = cfg.attention_layers[0]
    heads = {"self_attn.q_proj": mixer.N, "self_attn.k_proj": mixer.K}
    for name, tensor in tensors.items():
        w = dequantized(file, tensor)
        for part, n_heads in heads.items():
            if part in name:
                w = unpermute(w, n_heads)
        yield w.astype(dtype, copy=False)


def unpermute(w: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of each head reordered from llama.cpp's adjacent pairs to Hugging Face's halves."""
    pairs = w.reshape(n_heads, w.shape[0] // n_heads // 2, 2, *w.shape[1:])
    return pairs.swapaxes(1, 2).reshape(w.shape)
