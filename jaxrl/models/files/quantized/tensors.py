"""Matrices that files store in few bits: codes, scales and zero points in separate tensors.

The values are bfloat16, as in a file of the dequantized model, and only those of the part that is
read are computed: in float32, value of the code minus zero point, times scale.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxrl.models.files.quantized.scheme import WeightFormat
from jaxrl.models.files.safetensors import DTYPES, TensorInfo, map_tensor

BYTE, FLOAT, BF16 = DTYPES["U8"], DTYPES["F32"], DTYPES["BF16"]
CHUNK = 2**20  # values that are dequantized at once
BYTES = np.arange(256, dtype=np.uint8)
HALVES = np.stack([BYTES & 15, BYTES >> 4], axis=1)  # two codes in a byte, the low half first
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], FLOAT)  # of codes 0 to 7; then the negative ones
# Values of the codes in each byte. Two are one item of 8 bytes, which numpy finds 7 times faster.
TABLES = {
    "float8": BYTES.view(ml_dtypes.float8_e4m3fn).astype(FLOAT),
    "int8": BYTES.view(np.int8).astype(FLOAT),
    "packed8": BYTES.astype(FLOAT) - 128,
    "packed4": (HALVES.astype(FLOAT) - 8).view(np.uint64)[:, 0],
    "mxfp4": np.concatenate([E2M1, -E2M1])[HALVES].view(np.uint64)[:, 0],
}


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [R, C], or one of each expert [E, R, C]; the codes are in rows of whole bytes.

    With `n_turns`, the rows of so many matrices are in turns, and this is the one at `turn`.
    """

    format: WeightFormat
    n_experts: int  # 0: one matrix
    matrix: tuple[int, int]  # R, C
    codes: TensorInfo
    scale: TensorInfo  # [(E,) row blocks, column blocks]
    zero: TensorInfo | None = None  # as `scale`; that of packed codes is packed along its rows
    n_turns: int = 1
    turn: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        matrix = self.matrix[0] // self.n_turns, self.matrix[1]
        matrix = matrix[::-1] if self.format.transposed else matrix
        return (self.n_experts, *matrix) if self.n_experts else matrix

    @property
    def dtype(self) -> np.dtype:
        return BF16

    @property
    def path(self) -> Path:
        return self.codes.path

    @property
    def start(self) -> int:
        """Offset of the first code in its file."""
        return self.codes.start

    @property
    def n_bytes(self) -> int:
        """Bytes of the codes."""
        return self.codes.n_bytes

    def part(self, expert: int, index: int, n_parts: int) -> "QuantizedTensor":
        """One of `n_parts` equal ranges of rows of an expert's matrix.

        Raises ValueError if a scale belongs to two of them.
        """
        rows, columns = self.matrix[0] // n_parts, self.matrix[1]
        if n_parts > 1 and rows % scale_block(self.format, self.matrix)[0]:
            raise ValueError(
                f"{self.path} has fused experts whose parts of {rows} rows are not whole blocks of "
                f"{self.format.block[0]}; use a checkpoint with separate experts"
            )
        place = expert * n_parts + index
        return dataclasses.replace(
            self,
            n_experts=0,
            matrix=(rows, columns),
            codes=equal_part(self.codes, self.n_experts * n_parts, place),
            scale=equal_part(self.scale, self.n_experts * n_parts, place),
            zero=self.zero and equal_part(self.zero, self.n_experts * n_parts, place),
        )

    def interleaved_part(self, expert: int, turn: int, n_turns: int) -> "QuantizedTensor":
        """The matrix [out, in] at `turn` of `n_turns` whose rows are in turns in an expert's."""
        part = self.part(expert, 0, 1)
        fmt = dataclasses.replace(part.format, transposed=False)
        return dataclasses.replace(part, format=fmt, n_turns=n_turns, turn=turn)

    def read(self, places: Sequence[np.ndarray]) -> np.ndarray:
        """The values at all combinations of places, one array of numbers for each axis."""
        if self.n_experts:
            experts, *rest = places
            out = np.empty([len(numbers) for numbers in places], BF16)
            for i, expert in enumerate(experts):
                out[i] = self.part(int(expert), 0, 1).read(rest)
            return out
        rows, columns = places[::-1] if self.format.transposed else places
        rows = rows * self.n_turns + self.turn
        step = max(1, CHUNK // max(1, len(columns)))
        out = np.empty((len(rows), len(columns)), BF16)
        for i in range(0, len(rows), step):
            out[i : i + step] = dequantize(self, rows[i : i + step], columns)
        return out.T if self.format.transposed else out


FileTensor = TensorInfo | QuantizedTensor


def read_tensor(info: FileTensor) -> np.ndarray:
    """A tensor: mapped into memory, or dequantized."""
    if isinstance(info, TensorInfo):
        return map_tensor(info)
    return info.read([np.arange(n) for n in info.shape])


def equal_part(info: TensorInfo, n_parts: int, index: int) -> TensorInfo:
    """One of `n_parts` equal parts of a tensor in the order of the file, as a vector."""
    shape = (math.prod(info.shape) // n_parts,)
    return TensorInfo(info.path, info.dtype, shape, info.start + index * info.n_bytes // n_parts)


def scale_block(fmt: WeightFormat, matrix: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a matrix that share a scale."""
    return fmt.block[0] or matrix[0], fmt.block[1] or matrix[1]


def scale_grid(fmt: WeightFormat, matrix: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a matrix; the last blocks may be incomplete."""
    rows, columns = scale_block(fmt, matrix)
    return -(-matrix[0] // rows), -(-matrix[1] // columns)


def row_bytes(fmt: WeightFormat, n_columns: int) -> int:
    """Bytes of a row of codes; packed ones are in words of four bytes."""
    if fmt.is_packed:
        return -(-n_columns * fmt.n_bits // 32) * 4
    return n_columns * fmt.n_bits // 8


def dequantize(tensor: QuantizedTensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Values of a matrix in float32: [rows, columns]."""
    fmt, table = tensor.format, TABLES[tensor.format.table]
    n = table.itemsize // FLOAT.itemsize  # codes in a byte
    first, last = int(columns.min()) // n, int(columns.max()) // n + 1
    width = row_bytes(fmt, tensor.matrix[1])
    codes = TensorInfo(tensor.path, BYTE, (tensor.matrix[0], width), tensor.start)
    values = table[map_tensor(codes)[span(rows)][:, first:last]].view(FLOAT)
    values = values[:, span(columns - first * n)]
    block_rows, block_columns = scale_block(fmt, tensor.matrix)
    n_rows, n_columns = scale_grid(fmt, tensor.matrix)
    scale = map_tensor(tensor.scale).reshape(n_rows, n_columns)[rows // block_rows]
    if fmt.table == "mxfp4":  # powers of two, by their exponents
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    if tensor.zero is not None:
        zero = zero_points(fmt, map_tensor(tensor.zero), rows // block_rows, n_columns)
        values = values - zero[:, columns // block_columns]
    return values * scale.astype(FLOAT)[:, columns // block_columns]


def span(numbers: np.ndarray) -> slice | np.ndarray:
    """The numbers as an index: a slice if they are successive, which copies nothing."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return slice(first, last + 1)
    return numbers


def zero_points(
    fmt: WeightFormat, stored: np.ndarray, row_blocks: np.ndarray, n_columns: int
) -> np.ndarray:
    """The zero points of some rows in float32: [rows, column blocks]."""
    found = stored.reshape(-1, n_columns)
    if not fmt.is_packed:
        return found[row_blocks].astype(FLOAT)
    per_word, half = 32 // fmt.n_bits, 2 ** (fmt.n_bits - 1)
    words = found[row_blocks // per_word].view(np.uint32)
    shift = (row_blocks % per_word * fmt.n_bits).astype(np.uint32)
    return (words >> shift[:, None] & np.uint32(2 * half - 1)).astype(FLOAT) - half
