"""Writes tiny quantized tensors with the values that transformers and compressed-tensors give.

tests/models/golden_quantized/<name>/ has config.json with a quantization_config, model.safetensors
with the parts of one matrix "a.weight" (of experts "a.experts.gate_up_proj"), and
expected.safetensors with its values in bfloat16.

torch is not a dependency of the project; run this in a separate environment:
    python -m venv /tmp/torch
    /tmp/torch/bin/pip install torch transformers==5.23 compressed-tensors==0.20 safetensors
    /tmp/torch/bin/python scripts/make_golden_quantized.py tests/models/golden_quantized
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]  only in that environment
from compressed_tensors.compressors import (  # pyright: ignore[reportMissingImports]
    BaseCompressor,
)
from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
    QuantizationArgs,
    QuantizationScheme,
)
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import (
    _dequantize_fp8_weight,  # pyright: ignore[reportPrivateUsage]
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROWS, COLUMNS = 20, 48
GROUP = dict(strategy="group", group_size=16)
# Format and weights of a group of compressed-tensors, and the dtype of its scales.
COMPRESSED = {
    "int4_group": ("pack-quantized", dict(num_bits=4, **GROUP), torch.bfloat16),
    "int4_group_zero": (
        "pack-quantized",
        dict(num_bits=4, symmetric=False, **GROUP),
        torch.float32,
    ),
    "int4_channel": ("pack-quantized", dict(num_bits=4, strategy="channel"), torch.bfloat16),
    "int8_packed_zero": (
        "pack-quantized",
        dict(num_bits=8, symmetric=False, strategy="channel"),
        torch.bfloat16,
    ),
    "int8_channel": ("int-quantized", dict(num_bits=8, strategy="channel"), torch.bfloat16),
    "int8_group_zero": (
        "naive-quantized",
        dict(num_bits=8, symmetric=False, **GROUP),
        torch.float32,
    ),
    "fp8_tensor": ("float-quantized", dict(type="float", strategy="tensor"), torch.bfloat16),
    "fp8_channel": ("float-quantized", dict(type="float", strategy="channel"), torch.float32),
    "fp8_block": (
        "float-quantized",
        dict(type="float", strategy="block", block_structure=[8, 16]),
        torch.bfloat16,
    ),
}


def compressed(
    name: str, fmt: str, weights: Mapping[str, Any], dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Config, parts and values of a matrix that compressed-tensors compresses and decompresses."""
    args = QuantizationArgs(**({"num_bits": 8} | dict(weights)))
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    columns = COLUMNS - 12 if name == "int4_channel" else COLUMNS  # words that are not full
    shape = {
        "tensor": (1,),
        "channel": (ROWS, 1),
        "group": (ROWS, columns // 16),
        "block": (-(-ROWS // 8), columns // 16),
    }[str(args.strategy)]
    state = {
        "weight": torch.randn(ROWS, columns),
        "weight_scale": (torch.rand(shape) * 0.02 + 0.01).to(dtype),
    }
    if not args.symmetric:
        half = 2 ** (args.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(fmt)
    parts = compressor.compress(state, scheme)
    values = compressor.decompress(dict(parts), scheme)["weight"]
    group = dict(targets=["Linear"], weights=json.loads(args.model_dump_json()))
    config = dict(
        quant_method="compressed-tensors",
        format=fmt,
        quantization_status="compressed",
        config_groups=dict(group_0=group),
        ignore=["lm_head"],
    )
    return config, {f"a.{k}": v for k, v in parts.items()}, {"a.weight": values}


def fp8(
    shape: tuple[int, ...], block: list[int] | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """FP8 of transformers, with a scale of each block."""
    rows, columns = block or shape[-2:]
    grid = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    codes = torch.randn(shape).mul(60).to(torch.float8_e4m3fn)
    scale = torch.rand(grid if block else ()) * 0.02 + 0.01
    values = _dequantize_fp8_weight(codes, scale, block, torch.float32)
    config = dict(
        quant_method="fp8",
        fmt="e4m3",
        activation_scheme="dynamic",
        weight_block_size=block,
        modules_to_not_convert=["lm_head"],
    )
    name = "a.weight" if len(shape) == 2 else "a.experts.gate_up_proj"
    return config, {name: codes, f"{name}_scale_inv": scale}, {name: values}


def mxfp4() -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Experts of gpt-oss."""
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 6, 3), dtype=torch.uint8)
    name = "a.experts.gate_up_proj"
    config = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    parts = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return config, parts, {name: convert_moe_packed_tensors(blocks, scales)}


def main(target: Path) -> None:
    torch.manual_seed(0)
    cases = {name: compressed(name, *case) for name, case in COMPRESSED.items()}
    cases["fp8_blocks"] = fp8((20, 44), [8, 16])
    cases["fp8_whole"] = fp8((20, 44), None)
    cases["fp8_experts"] = fp8((2, 32, 20), [8, 16])
    cases["mxfp4"] = mxfp4()
    for name, (config, parts, values) in cases.items():
        folder = target / name
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dict(quantization_config=config), indent=2)
        (folder / "config.json").write_text(text + "\n")
        save_file({k: v.contiguous() for k, v in parts.items()}, folder / "model.safetensors")
        expected = {k: v.to(torch.bfloat16).contiguous() for k, v in values.items()}
        save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
