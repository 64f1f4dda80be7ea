"""safetensors files, read as memory maps and written as a stream.

Neither needs more host memory than one tensor. Format: https://huggingface.co/docs/safetensors.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxrl.json_text import MAX_BYTES, parse_object

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
FLOATS = [DTYPES[code] for code in ("F64", "F32", "F16", "BF16")]
MAX_DIMS = 8
ADVICE = "download or export it again"
TensorShapes = Mapping[str, tuple[np.dtype, tuple[int, ...]]]  # name -> dtype, shape
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor in its file; `start` is the offset of its first byte.

    With `strides`, in values, it is a part of a tensor whose values are not next to each other.
    """

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...] = ()

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to write; `read` fetches its values when it is written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file by name, without their data.

    Raises ValueError for a truncated, malformed or other file and for unknown dtypes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        if header_len > min(size - 8, MAX_BYTES):
            raise ValueError(f"{path} is not a complete safetensors file; {ADVICE}")
        header = parse_object(file.read(header_len), f"the header of {path}", ADVICE)
    header.pop("__metadata__", None)
    data = 8 + header_len
    return {name: tensor_info(path, name, entry, data, size) for name, entry in header.items()}


def tensor_info(path: Path, name: str, entry: object, data: int, size: int) -> TensorInfo:
    """One entry of the header of a file of `size` bytes whose tensors start at byte `data`."""
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise ValueError(f"{path} has a malformed header entry for {name[:80]!r}; {ADVICE}")
    if code not in DTYPES:
        raise ValueError(
            f"{path} stores {name} as {code}; supported: {', '.join(DTYPES)}. "
            "Use a checkpoint that is not quantized"
        )
    if not all(type(n) is int and 0 <= n < 2**48 for n in shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"{path} has a malformed shape for {name[:80]!r}; {ADVICE}")
    info = TensorInfo(path, DTYPES[code], tuple(shape), data + begin)
    if begin < 0 or data + end > size or end - begin != info.n_bytes:
        raise ValueError(f"{path} is truncated at {name}; {ADVICE}")
    return info


def map_tensor(info: TensorInfo) -> np.ndarray:
    """The tensor as a read-only memory map: a slice reads only its own bytes."""
    if not info.n_bytes:
        return np.zeros(info.shape, info.dtype)
    if info.strides:
        n = 1 + sum((size - 1) * step for size, step in zip(info.shape, info.strides, strict=True))
        values = np.memmap(info.path, info.dtype, mode="r", offset=info.start, shape=(n,))
        strides = [step * info.dtype.itemsize for step in info.strides]
        return np.lib.stride_tricks.as_strided(values, info.shape, strides, writeable=False)
    return np.memmap(info.path, info.dtype, mode="r", offset=info.start, shape=info.shape)


def write_tensors(path: Path, layout: TensorShapes, values: Iterable[np.ndarray]) -> None:
    """Writes tensors one at a time; `values` follow `layout` in order."""
    with path.open("wb") as file:
        file.write(header_of(layout))
        for (name, (dtype, shape)), value in zip(layout.items(), values, strict=True):
            if value.dtype != dtype or value.shape != shape:
                raise ValueError(f"{name}: {value.dtype}{value.shape} announced as {dtype}{shape}")
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def create_tensors(path: Path, layout: TensorShapes) -> dict[str, np.ndarray]:
    """A file of zeros as writable memory maps by name, to fill in any order."""
    header = header_of(layout)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in layout.items()}
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(sizes.values()))
    maps, start = {}, len(header)
    for name, (dtype, shape) in layout.items():
        maps[name] = np.zeros(shape, dtype)
        if sizes[name]:
            maps[name] = np.memmap(path, dtype, mode="r+", offset=start, shape=shape)
        start += sizes[name]
    return maps


def header_of(layout: TensorShapes) -> bytes:
    """The bytes of a file before the data of its tensors."""
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensor data starts on a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
