"""Codes of matrices with their scales: the tensors of a file -> quantized tensors by name."""

import math
from collections.abc import Mapping

import numpy as np

from jaxrl.models.files.quantized.scheme import QuantizationScheme, WeightFormat
from jaxrl.models.files.quantized.tensors import (
    FileTensor,
    QuantizedTensor,
    row_bytes,
    scale_grid,
)
from jaxrl.models.files.safetensors import DTYPES, FLOATS, TensorInfo, map_tensor

CODE_TYPES = {
    "float8": DTYPES["F8_E4M3"],
    "int8": DTYPES["I8"],
    "packed4": DTYPES["I32"],
    "packed8": DTYPES["I32"],
    "mxfp4": DTYPES["U8"],
}
SHAPE, ZERO = "_shape", "_zero_point"
# Ends of names. Tensors of the first kind quantize activations or the KV cache, not weights; of the
# second kind are parts of a weight.
ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
    *(".activation_scale", "_activation_scale", ".k_scale", ".v_scale", ".q_scale"),
    *(".k_zero_point", ".v_zero_point", ".q_zero_point"),
)
PARTS = (
    *(".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_packed", ".weight_g_idx"),
    *("_scale_inv", "_blocks", "_scales"),
)
MAX_LISTED = 4  # errors in one message


def pair_tensors(
    stored: Mapping[str, TensorInfo], scheme: QuantizationScheme
) -> dict[str, FileTensor]:
    """The tensors of a model by name, each quantized one made of its parts.

    The files, not config.json, say which tensors are quantized; the others are as they are. Raises
    one ValueError for missing parts, for those of a wrong shape or type, and for those without
    codes.
    """
    pairs: dict[str, FileTensor] = {}
    used: set[str] = set()
    errors = []
    for name, info in stored.items():
        if formats := code_formats(name, info, scheme):
            base = name.removesuffix(formats[0].codes)
            used |= {name} | {base + end for end in (SHAPE, ZERO, *(f.scale for f in formats))}
            try:
                pairs[base] = first_fitting(stored, base, formats)
            except ValueError as error:
                errors.append(str(error))
    rest = {n: info for n, info in stored.items() if n not in used and not n.endswith(ACTIVATIONS)}
    errors += [f"{name} has no codes to which it belongs" for name in rest if name.endswith(PARTS)]
    errors += [f"{name} has values and also codes" for name in sorted(rest.keys() & pairs.keys())]
    if errors:
        more = [f"and {len(errors) - MAX_LISTED} more"] if len(errors) > MAX_LISTED else []
        folder = next(iter(stored.values())).path.parent
        raise ValueError(
            f"the weights in {folder} are not {scheme.title}, as quantization_config says: "
            f"{'; '.join(errors[:MAX_LISTED] + more)}; download the model again, with its own "
            "config.json"
        )
    return rest | pairs


def code_formats(name: str, info: TensorInfo, scheme: QuantizationScheme) -> list[WeightFormat]:
    """The formats whose codes a tensor may be."""
    return [
        fmt
        for fmt in scheme.formats
        if info.dtype == CODE_TYPES[fmt.table]
        and name.endswith(fmt.codes)
        and not name.endswith((*ACTIVATIONS, ZERO, SHAPE))
    ]


def first_fitting(
    stored: Mapping[str, TensorInfo], base: str, formats: list[WeightFormat]
) -> QuantizedTensor:
    """A tensor in the first format that fits its parts. Raises the errors of the others if none."""
    errors = []
    for fmt in formats:
        try:
            return quantized_tensor(stored, base, fmt)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(", or ".join(dict.fromkeys(errors)))


def quantized_tensor(
    stored: Mapping[str, TensorInfo], base: str, fmt: WeightFormat
) -> QuantizedTensor:
    """The tensor `base` made of its parts. Raises ValueError for missing or wrong ones."""
    codes, scale = stored[base + fmt.codes], part_of(stored, base + fmt.scale)
    lead, matrix = codes_shape(stored, base, fmt)
    grid = (*lead, *scale_grid(fmt, matrix))
    scale_types = [DTYPES["U8"]] if fmt.table == "mxfp4" else [*FLOATS, DTYPES["F8_E8M0"]]
    check_part(base + fmt.scale, scale, grid, scale_types)
    zero = stored.get(base + ZERO)
    if zero is None and not fmt.symmetric:
        raise ValueError(f"{base + ZERO} is missing")
    if zero is not None:
        packed = (-(-grid[0] * fmt.n_bits // 32), *grid[1:])
        check_part(base + ZERO, zero, packed if fmt.is_packed else grid, [codes.dtype])
    return QuantizedTensor(fmt, lead[0] if lead else 0, matrix, codes, scale, zero)


def codes_shape(
    stored: Mapping[str, TensorInfo], base: str, fmt: WeightFormat
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The leading axis of experts, if there is one, and the shape of a matrix of the codes."""
    name = base + fmt.codes
    shape = stored[name].shape
    if fmt.is_packed:
        sizes = part_of(stored, base + SHAPE)
        check_part(base + SHAPE, sizes, (2,), [DTYPES["I64"], DTYPES["I32"]])
        rows, columns = np.asarray(map_tensor(sizes)).tolist()
        if min(rows, columns) < 1 or shape != (rows, row_bytes(fmt, columns) // 4):
            raise ValueError(f"{name} is {list(shape)}, and {base + SHAPE} is {[rows, columns]}")
        return (), (rows, columns)
    if fmt.table == "mxfp4":
        n_codes = fmt.block[1]  # of a group, in the last axis
        if len(shape) != 4 or min(shape) < 1 or shape[3] != n_codes // 2:
            raise ValueError(f"{name} is {list(shape)}, expected [experts, rows, groups, 16]")
        return shape[:1], (shape[1], shape[2] * n_codes)
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise ValueError(f"{name} is {list(shape)}, expected a matrix, or one of each expert")
    return shape[:-2], (shape[-2], shape[-1])


def part_of(stored: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    if name not in stored:
        raise ValueError(f"{name} is missing")
    return stored[name]


def check_part(name: str, info: TensorInfo, shape: tuple[int, ...], dtypes: list[np.dtype]) -> None:
    """Raises ValueError for another shape or type; one value may have any shape."""
    one = math.prod(shape) == math.prod(info.shape) == 1
    if info.shape != shape and not one:
        raise ValueError(f"{name} is {list(info.shape)}, expected {list(shape)}")
    if info.dtype not in dtypes:
        raise ValueError(f"{name} is {info.dtype}, expected {' or '.join(map(str, dtypes))}")
