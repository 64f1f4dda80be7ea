"""Tensors of all experts of a layer <-> those of each expert.

Most files have `experts.gate_up_proj` [E, 2F, D], with all rows of gate before those of up, and
`experts.down_proj` [E, D, F]. Those of gpt-oss are [E, D, 2F] and [E, F, D], with gate and up in
turns; their biases are `gate_up_proj_bias` [E, 2F] and `down_proj_bias` [E, D]. Its quantized codes
are [E, 2F, D]. transformers reads gpt-oss and Gemma 4 only with fused experts, so an export joins
them again.
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxrl.json_text import read_object
from jaxrl.models.files.quantized.tensors import FileTensor, QuantizedTensor
from jaxrl.models.files.safetensors import Tensor, TensorInfo

FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
INTERLEAVED = ("gpt_oss",)  # model types with the second form
JOINED = ("gemma4",)  # families whose exports have the first form
ONE_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
ADVICE = "use the model's own config.json"


def has_interleaved_experts(folder: Path) -> bool:
    """Whether the fused experts of a model folder are [E, in, out], gate and up in turns."""
    path = folder / "config.json"
    return path.exists() and read_object(path, ADVICE).get("model_type") in INTERLEAVED


def separate_experts(name: str, info: FileTensor, *, interleaved: bool) -> dict[str, FileTensor]:
    """The matrices, or biases, of each expert in a tensor of all experts; others as they are."""
    stem, _, last = name.rpartition(".")
    if not stem.endswith(".experts"):
        return {name: info}
    if interleaved:
        return separate_interleaved(stem, last, info)
    parts = FUSED_EXPERTS.get(last, ())
    fused = parts and len(info.shape) == 3
    fused = fused and not (isinstance(info, QuantizedTensor) and info.format.transposed)
    if not fused or info.shape[1] % len(parts):
        return {name: info}
    shape = info.shape[1] // len(parts), info.shape[2]
    n_bytes = math.prod(shape) * info.dtype.itemsize
    experts = range(info.shape[0])
    names = [f"{stem}.{expert}.{part}.weight" for expert in experts for part in parts]
    if isinstance(info, QuantizedTensor):
        n = len(parts)
        return {part: info.part(i // n, i % n, n) for i, part in enumerate(names)}
    return {
        part: TensorInfo(info.path, info.dtype, shape, info.start + i * n_bytes)
        for i, part in enumerate(names)
    }


def separate_interleaved(stem: str, last: str, info: FileTensor) -> dict[str, FileTensor]:
    """`separate_experts` of a tensor [E, in, out], or of biases [E, out]."""
    is_bias = last.endswith("_bias")
    parts = FUSED_EXPERTS.get(last.removesuffix("_bias"), ())
    n = len(parts)
    if not parts or len(info.shape) != (2 if is_bias else 3) or info.shape[-1] % n:
        return {f"{stem}.{last}": info}

    def part(expert: int, i: int) -> FileTensor:
        if isinstance(info, QuantizedTensor):
            return info.interleaved_part(expert, i, n)
        start = info.start + (expert * math.prod(info.shape[1:]) + i) * info.dtype.itemsize
        shape, strides = (info.shape[-1] // n,), (n,)
        if not is_bias:
            shape, strides = (*shape, info.shape[1]), (*strides, info.shape[2])
        return TensorInfo(info.path, info.dtype, shape, start, strides)

    kind = "bias" if is_bias else "weight"
    return {
        f"{stem}.{expert}.{name}.{kind}": part(expert, i)
        for expert in range(info.shape[0])
        for i, name in enumerate(parts)
    }


def join_experts(tensors: Iterable[Tensor], *, interleaved: bool) -> list[Tensor]:
    """The inverse of `separate_experts`, for the tensors to write; others as they are."""
    others, apart = [], dict[str, list[Tensor]]()
    for tensor in tensors:
        if (name := joined_name(tensor.name)) == tensor.name:
            others.append(tensor)
        else:
            apart.setdefault(name, []).append(tensor)
    joined = [joined_tensor(name, found, interleaved) for name, found in apart.items()]
    return others + joined


def joined_name(name: str) -> str:
    """The name of the tensor of all experts that has a tensor of one; other names as they are."""
    if (found := ONE_EXPERT.fullmatch(name)) is None:
        return name
    stem, _, part, kind = found.groups()
    fused = next(name for name, parts in FUSED_EXPERTS.items() if part in parts)
    return f"{stem}.{fused}" + ("_bias" if kind == "bias" else "")


def joined_tensor(name: str, parts: list[Tensor], interleaved: bool) -> Tensor:
    """One tensor of all experts, of the matrices [out, in] or biases [out] of each."""
    places = {tensor.name: expert_place(tensor.name) for tensor in parts}
    n = 1 + max(turn for _, turn, _ in places.values())
    ordered = sorted(parts, key=lambda tensor: places[tensor.name])
    out, *into = ordered[0].shape
    E = len(ordered) // n
    shape = (E, *into, n * out) if interleaved else (E, n * out, *into)

    def read() -> np.ndarray:
        values = np.empty(shape, ordered[0].dtype)
        for tensor in ordered:
            expert_part(values, tensor.name, interleaved=interleaved)[...] = tensor.read()
        return values

    return dataclasses.replace(ordered[0], name=name, shape=shape, read=read)


def expert_part(values: np.ndarray, name: str, *, interleaved: bool) -> np.ndarray:
    """The part of a tensor of all experts with the values of a tensor of one."""
    expert, turn, n = expert_place(name)
    if interleaved:
        return values[expert, ..., turn::n].T
    out = values.shape[1] // n
    return values[expert, turn * out : (turn + 1) * out]


def expert_place(name: str) -> tuple[int, int, int]:
    """(number of its expert, its turn, the number of turns) of a tensor of one expert."""
    found = ONE_EXPERT.fullmatch(name)
    assert found is not None
    parts = next(parts for parts in FUSED_EXPERTS.values() if found[3] in parts)
    return int(found[2]), parts.index(found[3]), len(parts)
