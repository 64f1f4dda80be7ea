"""`quantization_config` of config.json -> the formats in which a folder stores its matrices.

Three methods are read: "fp8" of transformers, "mxfp4", and "compressed-tensors" with FP8 or
integers. All others are refused by name.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.json_text import read_object, shown

ENTRIES = ("quantization_config", "compression_config", "quantization")
READABLE = "FP8 (fp8), MXFP4 (mxfp4), and FP8, int4 and int8 of compressed-tensors"
ADVICE = "use the checkpoint's own config.json"
# Entries that are read, and those without effect on the values of weights.
KNOWN = {
    "fp8": {
        *("quant_method", "fmt", "weight_block_size", "scale_fmt", "expert_dtype"),
        *("activation_scheme", "dequantize", "ignored_layers", "modules_to_convert"),
        "modules_to_not_convert",
    },
    "mxfp4": {"quant_method", "dequantize", "modules_to_not_convert"},
    "compressed-tensors": {
        *("quant_method", "format", "config_groups", "quantization_status", "ignore"),
        *("kv_cache_scheme", "global_compression_ratio", "version", "sparsity_config"),
        *("run_compressed", "dequantize", "moe_sparsity_config"),
    },
}
KNOWN_GROUP = {"targets", "weights", "input_activations", "output_activations", "format"}
KNOWN_WEIGHTS = {
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"),
    *("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
}
FLAT = ("float-quantized", "int-quantized", "naive-quantized")  # one code in each element
PACKED = "pack-quantized"


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """Codes of a matrix, and the part of it that shares a scale.

    Its tensors have the matrix's name with a suffix. A code is an index of a table of values.
    """

    table: str  # "float8" | "int8" | "packed4" | "packed8" | "mxfp4"
    block: tuple[int, int]  # rows and columns that share a scale; 0: all of them
    codes: str = ""  # suffix
    scale: str = "_scale"  # suffix
    transposed: bool = False  # the values are [in, out] and the codes [out, in]
    symmetric: bool = True  # False: a zero point for every scale is subtracted from the codes

    @property
    def n_bits(self) -> int:
        return 4 if self.table in ("packed4", "mxfp4") else 8

    @property
    def is_packed(self) -> bool:
        """Whether codes are in words of 32 bits, and zero points too."""
        return self.table.startswith("packed")


@dataclasses.dataclass(frozen=True)
class QuantizationScheme:
    """The formats of a folder's matrices, and their name in messages."""

    title: str
    formats: tuple[WeightFormat, ...]


def folder_scheme(folder: Path) -> QuantizationScheme | None:
    """The scheme of a model folder; None if its weights are not quantized.

    Raises the errors of `read_scheme`, with the file's name.
    """
    path = folder / "config.json"
    if not path.exists():
        return None
    try:
        return read_scheme(read_object(path, ADVICE))
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from error


def read_scheme(config: Mapping[str, Any]) -> QuantizationScheme | None:
    """The scheme that a config.json or its `text_config` describes; None without one.

    Raises ValueError for methods and formats that are not read, and for unknown entries, which may
    change the values of weights.
    """
    text = config.get("text_config")
    levels = [config, *([text] if isinstance(text, dict) else [])]
    found = [(name, level[name]) for level in levels for name in ENTRIES if level.get(name)]
    if not found:
        return None
    name, entry = found[0]
    if any(other != entry for _, other in found):
        names = ", ".join(dict.fromkeys(name for name, _ in found))
        raise ValueError(f"config.json has several different entries {names}; {ADVICE}")
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    known = KNOWN.get(method) if isinstance(method, str) else None
    if known is None or (name != ENTRIES[0] and method != "compressed-tensors"):
        raise ValueError(
            f"the checkpoint is quantized ({name} in config.json, quant_method {shown(method)}), "
            f"and these are read: {READABLE}; use its unquantized version, which lora.base_dtype "
            "can quantize to int8 or nf4 for a frozen base"
        )
    check_known_entries(name, entry, known)
    return READERS[str(method)](entry)


def without_scheme(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model with weights that are not quantized."""
    plain = {name: value for name, value in config.items() if name not in ENTRIES}
    if isinstance(text := plain.get("text_config"), dict):
        plain["text_config"] = {name: text[name] for name in text if name not in ENTRIES}
    return plain


def check_known_entries(name: str, entry: Mapping[str, Any], known: set[str]) -> None:
    """Raises ValueError for the first entry that is neither known nor off."""
    for key, value in entry.items():
        if key not in known and value not in (None, False, 0, "", [], {}):
            raise ValueError(
                f"{key} of {name} is {shown(value)}, which is not known and may change the values "
                "of weights; use the unquantized version of the checkpoint"
            )


def fp8_scheme(entry: Mapping[str, Any]) -> QuantizationScheme:
    """FP8 of transformers: blocks of weight_block_size, or one scale for a matrix if it is null."""
    if (fmt := entry.get("fmt") or "e4m3") != "e4m3":
        raise unsupported("fmt", fmt, "e4m3")
    if (experts := entry.get("expert_dtype") or "fp8") != "fp8":
        raise unsupported("expert_dtype", experts, "fp8")
    block = sizes("weight_block_size", entry.get("weight_block_size", [128, 128]) or [0, 0])
    title = f"FP8 (e4m3) in blocks of {block[0]}x{block[1]}" if any(block) else "FP8 (e4m3)"
    return QuantizationScheme(title, (WeightFormat("float8", block, scale="_scale_inv"),))


def mxfp4_scheme(entry: Mapping[str, Any]) -> QuantizationScheme:
    """MXFP4: two e2m1 codes in a byte, and an e8m0 scale for 32 inputs of an output.

    As in experts of gpt-oss, the values are [in, out].
    """
    fmt = WeightFormat("mxfp4", (1, 32), codes="_blocks", scale="_scales", transposed=True)
    return QuantizationScheme("MXFP4", (fmt,))


def compressed_scheme(entry: Mapping[str, Any]) -> QuantizationScheme:
    """compressed-tensors: the formats of its groups; the tensors show which one a matrix has."""
    sparsity = entry.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise unsupported("format of sparsity_config", sparsity["format"], "dense")
    groups = entry.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"quantization_config has no object config_groups; {ADVICE}")
    formats, names = [], []
    for key, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ValueError(f"{key} of config_groups has no object weights; {ADVICE}")
        check_known_entries(f"config_groups.{key}", group, KNOWN_GROUP)
        check_known_entries(f"config_groups.{key}.weights", weights, KNOWN_WEIGHTS)
        name = group.get("format") or entry.get("format")
        formats.append(compressed_format(name, weights))
        is_float = formats[-1].table == "float8"
        kind = "FP8 (e4m3)" if is_float else f"int{weights.get('num_bits', 8)}"
        names.append(f"{kind} ({name})")
    title = f"{' and '.join(dict.fromkeys(names))} of compressed-tensors"
    return QuantizationScheme(title, tuple(dict.fromkeys(formats)))


def compressed_format(name: object, weights: Mapping[str, Any]) -> WeightFormat:
    """The format of one group by its `weights`."""
    kind, n_bits = weights.get("type", "int"), weights.get("num_bits", 8)
    block = scale_block(weights)
    if weights.get("dynamic"):
        raise unsupported("dynamic of weights", weights["dynamic"], "false")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise unsupported("actorder", weights["actorder"], "weight, or none,")
    symmetric = weights.get("symmetric", True) is not False
    n_bits = n_bits if type(n_bits) is int else 0
    if name == PACKED and kind == "int" and n_bits in (4, 8):
        return WeightFormat(f"packed{n_bits}", block, codes="_packed", symmetric=symmetric)
    if name in FLAT and kind == "int" and 2 <= n_bits <= 8:
        return WeightFormat("int8", block, symmetric=symmetric)
    if name in FLAT and kind == "float" and n_bits == 8 and symmetric:
        return WeightFormat("float8", block)
    raise ValueError(
        f"quantization_config stores weights as {shown(name)} with type {shown(kind)} and num_bits "
        f"{shown(weights.get('num_bits', 8))}, and these are read: {READABLE} (pack-quantized of 4 "
        f"or 8 bits, {', '.join(FLAT)}); use the unquantized version of the checkpoint"
    )


def scale_block(weights: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, by the strategy."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    strategy = strategy or ("group" if size not in (None, -1) else "tensor")
    if strategy == "group":
        return sizes("group_size", [1, size])
    if strategy == "block":
        return sizes("block_structure", weights.get("block_structure"))
    if strategy in ("tensor", "channel"):
        return (0, 0) if strategy == "tensor" else (1, 0)
    raise unsupported("strategy of weights", strategy, "tensor, channel, group or block")


def sizes(name: str, value: object) -> tuple[int, int]:
    """A pair of sizes of a block."""
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if type(rows) is int and type(columns) is int and min(value) >= 0 and max(value) < 2**24:
            return rows, columns
    raise ValueError(f"{name} of quantization_config is not a size of blocks: {value}; {ADVICE}")


def unsupported(name: str, value: object, supported: str) -> ValueError:
    return ValueError(
        f"{name} of quantization_config is {shown(value)}, and only {supported} is supported; use "
        "the unquantized version of the checkpoint"
    )


READERS = {"fp8": fp8_scheme, "mxfp4": mxfp4_scheme, "compressed-tensors": compressed_scheme}
