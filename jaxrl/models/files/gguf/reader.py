"""Metadata and tensors of a GGUF file; every count, length and offset is checked against its size.

The package gguf reads such files too, but believes the counts: an array of 2**60 numbers in a file
of 100 bytes keeps it appending to a list. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

MAX_HEADER_BYTES = 100_000_000  # metadata and tensor table, as for safetensors
MAX_DIMS = 4
MAX_ALIGNMENT = 2**20
STRING, ARRAY = 8, 9  # codes of value types; the others are numbers
NUMBERS = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
U32, U64 = NUMBERS[4], NUMBERS[10]

GgufValue = bool | int | float | str | list[str] | np.ndarray


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor as it is stored; `kind` is a number of gguf.GGMLQuantizationType."""

    shape: tuple[int, ...]  # outermost dimension first
    kind: int
    offset: int  # in the file


@dataclasses.dataclass(frozen=True)
class GgufFile:
    data: np.ndarray  # the bytes of the file, mapped
    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]


class Cursor:
    """Reads values one after another. Raises ValueError with file and position at the end."""

    def __init__(self, path: Path, data: np.ndarray):
        self._path, self._data = path, data[:MAX_HEADER_BYTES]
        self.at = 0

    def error(self, what: str) -> ValueError:
        return ValueError(
            f"{self._path} is not a valid GGUF file: {what} at byte {self.at}; download it again"
        )

    def numbers(self, dtype: np.dtype, count: int) -> np.ndarray:
        n_bytes = count * dtype.itemsize
        if n_bytes > len(self._data) - self.at:
            raise self.error(f"{count} values of {dtype.itemsize} bytes beyond its end")
        found = self._data[self.at : self.at + n_bytes].view(dtype)
        self.at += n_bytes
        return found

    def integer(self, dtype: np.dtype) -> int:
        return int(self.numbers(dtype, 1)[0])

    def text(self) -> str:
        raw = self.numbers(NUMBERS[0], self.integer(U64)).tobytes()
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error("text that is not UTF-8") from error

    def value(self) -> GgufValue:
        kind = self.integer(U32)
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.numbers(self.dtype(kind), 1)[0].item()
        kind, count = self.integer(U32), self.integer(U64)
        if kind != STRING:
            return self.numbers(self.dtype(kind), count)
        if count > (len(self._data) - self.at) // U64.itemsize:
            raise self.error(f"{count} strings beyond its end")
        return [self.text() for _ in range(count)]

    def dtype(self, kind: int) -> np.dtype:
        if kind not in NUMBERS:
            raise self.error(f"the unknown or unsupported value type {kind}")
        return NUMBERS[kind]

    def tensor(self) -> GgufTensor:
        n_dims = self.integer(U32)
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.error(f"a tensor of {n_dims} dimensions")
        shape = tuple(int(n) for n in reversed(self.numbers(U64, n_dims)))
        return GgufTensor(shape, self.integer(U32), self.integer(U64))


def read_gguf(path: Path) -> GgufFile:
    """The metadata and the tensor table of a file. Raises ValueError if it is malformed."""
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; download it again")
    data = np.memmap(path, np.uint8, mode="r")
    cursor = Cursor(path, data)
    if cursor.numbers(NUMBERS[0], 4).tobytes() != b"GGUF":
        raise cursor.error("no magic number")
    if (version := cursor.integer(U32)) not in (2, 3):
        raise cursor.error(f"version {version}, which is not 2 or 3,")
    n_tensors, n_values = cursor.integer(U64), cursor.integer(U64)
    metadata: dict[str, GgufValue] = {}
    for _ in range(n_values):
        key = cursor.text()
        metadata[key] = cursor.value()
    tensors: dict[str, GgufTensor] = {}
    for _ in range(n_tensors):
        if (name := cursor.text()) in tensors:
            raise cursor.error(f"a second tensor {name[:80]!r}")
        tensors[name] = cursor.tensor()
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
        raise cursor.error(f"alignment {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    placed = {n: dataclasses.replace(t, offset=start + t.offset) for n, t in tensors.items()}
    return GgufFile(data, metadata, placed)


def entry[T: (int, float, str, list)](
    metadata: Mapping[str, GgufValue], key: str, kind: type[T], path: Path, default: T | None = None
) -> T:
    """A metadata entry of the given type; an entry without `default` is required."""
    value = metadata.get(key, default)
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    found = "no entry" if value is None else f"{type(value).__name__} {repr(value)[:80]} as"
    raise ValueError(
        f"{path} has {found} {key}, expected {kind.__name__}; use the safetensors version of "
        "this model"
    )


def dequantized(file: GgufFile, tensor: GgufTensor) -> np.ndarray:
    """The tensor in float32 and in its shape. `check_tensor` has accepted it."""
    from gguf import GGMLQuantizationType, dequantize  # an extra: only GGUF files need it

    raw = file.data[tensor.offset : tensor.offset + math.prod(byte_shape(tensor))]
    rows = raw.reshape(byte_shape(tensor))
    return dequantize(rows, GGMLQuantizationType(tensor.kind)).reshape(tensor.shape)


def check_tensor(file: GgufFile, name: str, tensor: GgufTensor, path: Path) -> None:
    """Raises ValueError if the data are outside of the file or of an unsupported type."""
    try:
        n_bytes = math.prod(byte_shape(tensor))
    except ValueError as error:
        raise ValueError(
            f"{path} stores {name} with type {tensor.kind} and shape {list(tensor.shape)}, which "
            f"is not supported ({error}); use the safetensors version of this model"
        ) from error
    if tensor.offset + n_bytes > len(file.data):
        raise ValueError(f"{path} is truncated at {name}; download it again")


def byte_shape(tensor: GgufTensor) -> tuple[int, ...]:
    """Shape of the stored bytes. Raises ValueError for unknown types and incomplete blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize  # an extra

    kind = GGMLQuantizationType(tensor.kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros(block_bytes, np.uint8), kind)
    except NotImplementedError as error:
        raise ValueError(str(error)) from error
    *rows, columns = tensor.shape
    if columns % block:
        raise ValueError(f"rows of {columns} are not whole blocks of {block}")
    return (*rows, columns // block * block_bytes)
