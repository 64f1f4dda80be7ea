"""Matrices in few bits: values, slices on devices, exports, and errors for damaged files.

Tests of jaxrl/models/files/quantized/ and of what reads them. golden_quantized/ is from
transformers and compressed-tensors (scripts/make_golden_quantized.py).
"""

import itertools
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models.files.hf_config import folder_config
from jaxrl.models.files.hf_load import load_model
from jaxrl.models.files.hf_save import convert_model, save_model
from jaxrl.models.files.kept_record import kept_record
from jaxrl.models.files.quantized.scheme import read_scheme
from jaxrl.models.files.quantized.tensors import QuantizedTensor, read_tensor
from jaxrl.models.files.weight_files import all_tensors, find_tensors, kept_tensors
from sharding import TRAIN, make_mesh

MODELS = Path(__file__).parents[1]
CASES = sorted(path.name for path in (MODELS / "golden_quantized").iterdir())
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
FP8_CONFIG = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[16, 32])


def group_config(fmt: str, **weights) -> dict:
    return dict(
        quant_method="compressed-tensors", format=fmt, config_groups=dict(g=dict(weights=weights))
    )


INT4 = group_config("pack-quantized", num_bits=4, strategy="group", group_size=4)


def write_folder(folder: Path, quantization: dict, tensors: dict, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=quantization)))
    return folder


def fp8_parts(name: str, w: np.ndarray) -> dict[str, np.ndarray]:
    """A matrix, or one of each expert, in FP8 with a scale of each 16 x 32 block."""
    *lead, rows, columns = w.shape
    scale = np.zeros((*lead, -(-rows // 16), -(-columns // 32)), np.float32)
    codes = np.zeros(w.shape, FP8)
    for place in np.ndindex(scale.shape):
        i, j = place[-2:]
        block = (*place[:-2], slice(16 * i, 16 * i + 16), slice(32 * j, 32 * j + 32))
        scale[place] = np.abs(w[block]).max() / 448 + 1e-9
        codes[block] = (w[block] / scale[place]).astype(FP8)
    return {name: codes, f"{name}_scale_inv": scale}


def fp8_values(parts: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The matrix in bfloat16."""
    codes, scale = parts[name], parts[f"{name}_scale_inv"]
    rows, columns = codes.shape[-2:]
    each = np.repeat(np.repeat(scale, 16, axis=-2), 32, axis=-1)[..., :rows, :columns]
    return (codes.astype(np.float32) * each).astype(BF16)


def fp8_model(source: str, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A golden model with its layers' matrices in FP8, and the values of all of its tensors."""
    stored, values = {}, {}
    for name, w in load_file(MODELS / "golden" / source / "model.safetensors").items():
        quantized = ".layers." in name and w.ndim == 2
        parts = fp8_parts(name, w.astype(np.float32)) if quantized else {name: w.astype(BF16)}
        stored |= parts
        values[name] = fp8_values(parts, name) if quantized else parts[name]
    config = json.loads((MODELS / "golden" / source / "config.json").read_text())
    return write_folder(folder, FP8_CONFIG, stored, **config), values


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_transformers_and_compressed_tensors(case):
    folder = MODELS / "golden_quantized" / case
    expected, found = load_file(folder / "expected.safetensors"), dict(all_tensors(folder))
    assert found.keys() == expected.keys()
    for name, info in found.items():
        assert isinstance(info, QuantizedTensor) and info.shape == expected[name].shape
        np.testing.assert_array_equal(read_tensor(info), expected[name])
        places = [np.arange(1, n, 2) for n in info.shape]
        np.testing.assert_array_equal(info.read(places), expected[name][np.ix_(*places)])


def test_fp8_by_hand(tmp_path):
    # 0x38 is 1, 0x40 is 2, 0xC4 is -3; the third column is in a second block.
    codes = np.array([[0x38, 0x40, 0xC4]], np.uint8).view(FP8)
    scale = np.array([[0.5, 10]], np.float32)
    config = FP8_CONFIG | dict(weight_block_size=[2, 2])
    folder = write_folder(tmp_path, config, {"a.weight": codes, "a.weight_scale_inv": scale})
    np.testing.assert_array_equal(read_tensor(find_tensors(folder)["a.weight"]), [[0.5, 1, -30]])


def test_mxfp4_by_hand(tmp_path):
    # Low half first: codes 2, 9 are 1, -0.5; 7, 0 are 6, 0. A scale of 128 is 2, one of 126 is 0.5.
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    blocks[0, :, 0, 0] = [0x92, 0x07]
    scales = np.array([[[128], [126]]], np.uint8)
    name = "m.experts.gate_up_proj"  # stays fused: gate and up are interleaved in it
    parts = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folder = write_folder(tmp_path, dict(quant_method="mxfp4"), parts)
    values = read_tensor(find_tensors(folder)[name])
    assert values.shape == (1, 32, 2)  # experts, in, out
    np.testing.assert_array_equal(values[0, :2], [[2, 3], [-1, 0]])
    assert not values[0, 2:].any()


def test_mxfp4_experts_of_gpt_oss_are_separated(tmp_path):
    """The rows of gate and up are in turns; their values are those of the plain tensor."""
    rng = np.random.default_rng(0)
    parts = {
        "m.experts.gate_up_proj_blocks": rng.integers(0, 256, (2, 6, 2, 16), np.uint8),
        "m.experts.gate_up_proj_scales": rng.integers(120, 130, (2, 6, 2), np.uint8),
        "m.experts.gate_up_proj_bias": rng.normal(size=(2, 6)).astype(BF16),
        "m.experts.down_proj_bias": rng.normal(size=(2, 64)).astype(BF16),
    }
    fused = write_folder(tmp_path / "fused", dict(quant_method="mxfp4"), parts)
    whole = read_tensor(find_tensors(fused)["m.experts.gate_up_proj"])
    assert whole.shape == (2, 64, 6)
    folder = write_folder(tmp_path / "apart", dict(quant_method="mxfp4"), parts)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(model_type="gpt_oss")))
    found = find_tensors(folder)
    assert len(found) == 2 * (2 + 3)
    for e, (turn, name) in itertools.product(range(2), enumerate(("gate", "up"))):
        one = found[f"m.experts.{e}.{name}_proj.weight"]
        assert one.shape == (3, 64)
        np.testing.assert_array_equal(read_tensor(one), whole[e, :, turn::2].T)
        places = [np.array([2, 0]), np.array([40, 3])]
        np.testing.assert_array_equal(one.read(places), whole[e, :, turn::2].T[np.ix_(*places)])
        bias = read_tensor(found[f"m.experts.{e}.{name}_proj.bias"])
        np.testing.assert_array_equal(bias, parts["m.experts.gate_up_proj_bias"][e, turn::2])
        down = read_tensor(found[f"m.experts.{e}.down_proj.bias"])
        np.testing.assert_array_equal(down, parts["m.experts.down_proj_bias"][e])


def int4_parts() -> dict[str, np.ndarray]:
    # Columns 0 to 7 of row 0 have the codes 0 to 7, which are -8 to -1; row 1 the codes 8 to 15.
    # Zero points are packed over rows: of row 0 they are 8 - 8 and 9 - 8, of row 1 7 - 8 and 8 - 8.
    packed = np.array([[0x76543210], [0xFEDCBA98]], np.uint32).view(np.int32)
    return {
        "a.weight_packed": packed,
        "a.weight_scale": np.array([[1, 2], [0.5, 1]], BF16),
        "a.weight_zero_point": np.array([[0x78, 0x89]], np.int32),
        "a.weight_shape": np.array([2, 8]),
    }


def test_int4_by_hand(tmp_path):
    folder = write_folder(tmp_path, INT4, int4_parts())
    expected = [[-8, -7, -6, -5, -10, -8, -6, -4], [0.5, 1, 1.5, 2, 4, 5, 6, 7]]
    np.testing.assert_array_equal(read_tensor(find_tensors(folder)["a.weight"]), expected)
    symmetric = {k: v for k, v in int4_parts().items() if not k.endswith("zero_point")}
    folder = write_folder(tmp_path / "b", INT4, symmetric)
    expected = [[-8, -7, -6, -5, -8, -6, -4, -2], [0, 0.5, 1, 1.5, 4, 5, 6, 7]]
    np.testing.assert_array_equal(read_tensor(find_tensors(folder)["a.weight"]), expected)


def test_each_device_gets_its_slice(tmp_path, caplog):
    source, values = fp8_model("qwen3", tmp_path / "fp8")
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)), caplog.at_level(logging.WARNING):
        _, model = load_model(source, rules=TRAIN, dtype=jnp.bfloat16, stacked=True)
        q = model.layers.attn.q.w
        for shard in q.addressable_shards:
            whole = values[Q].reshape(q.shape[1:])
            np.testing.assert_array_equal(np.asarray(shard.data)[0], whole[shard.index[1:]])
    assert "FP8 (e4m3) in blocks of 16x32" in caplog.text and "Exports are not quant" in caplog.text


def test_exports_have_no_codes(tmp_path, one_device):
    source, values = fp8_model("qwen3", tmp_path / "fp8")
    save_model(
        tmp_path / "out", load_model(source, rules=TRAIN, dtype=jnp.bfloat16)[1], source=source
    )
    convert_model(source, tmp_path / "converted")
    for folder in (tmp_path / "out", tmp_path / "converted"):
        written = load_file(folder / "model.safetensors")
        assert written.keys() == values.keys()
        for name, value in values.items():
            assert written[name].dtype == BF16
            np.testing.assert_array_equal(written[name], value, err_msg=name)
        config = json.loads((folder / "config.json").read_text())
        assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
        assert folder_config(folder) == folder_config(source)


def test_only_a_slice_is_dequantized(tmp_path, monkeypatch):
    source, _ = fp8_model("qwen3", tmp_path / "fp8")
    info = find_tensors(source)[UP]
    assert isinstance(info, QuantizedTensor)
    read = []
    monkeypatch.setattr(
        "jaxrl.models.files.quantized.tensors.dequantize",
        lambda tensor, rows, columns: read.append((rows, columns)) or np.zeros((2, 3)),
    )
    info.read([np.array([4, 5]), np.array([7, 8, 9])])
    ((rows, columns),) = read
    assert rows.tolist() == [4, 5] and columns.tolist() == [7, 8, 9]


def test_fused_experts_are_separated(tmp_path):
    rng = np.random.default_rng(0)
    gate_up, down = rng.normal(size=(2, 32, 40)), rng.normal(size=(2, 40, 16))
    parts = fp8_parts("m.experts.gate_up_proj", gate_up) | fp8_parts("m.experts.down_proj", down)
    found = find_tensors(write_folder(tmp_path, FP8_CONFIG, parts))
    fused = fp8_values(parts, "m.experts.gate_up_proj")
    for e in range(2):
        gate, up = (read_tensor(found[f"m.experts.{e}.{n}_proj.weight"]) for n in ("gate", "up"))
        np.testing.assert_array_equal(np.concatenate([gate, up]), fused[e])
        one = read_tensor(found[f"m.experts.{e}.down_proj.weight"])
        np.testing.assert_array_equal(one, fp8_values(parts, "m.experts.down_proj")[e])
    config = FP8_CONFIG | dict(weight_block_size=[32, 32])
    parts["m.experts.gate_up_proj_scale_inv"] = np.ones((2, 1, 2), np.float32)
    parts["m.experts.down_proj_scale_inv"] = np.ones((2, 2, 1), np.float32)
    with pytest.raises(ValueError, match="parts of 16 rows are not whole blocks of 32"):
        find_tensors(write_folder(tmp_path, config, parts))


def test_a_drafter_is_exported_dequantized(tmp_path):
    w = np.random.default_rng(0).normal(size=(20, 40))
    parts = fp8_parts("mtp.fc.weight", w)
    folder = write_folder(tmp_path, FP8_CONFIG, parts)
    (kept,) = kept_tensors(folder).items()
    assert kept_record(folder)["n_tensors"] == 1
    assert kept[0] == "mtp.fc.weight"
    np.testing.assert_array_equal(read_tensor(kept[1]), fp8_values(parts, "mtp.fc.weight"))


@pytest.mark.thorough
def test_a_frozen_base_is_quantized_again(tmp_path, one_device, caplog):
    source, _ = fp8_model("qwen3", tmp_path / "fp8")
    (tmp_path / "plain").mkdir()
    convert_model(source, tmp_path / "plain" / "m")
    models = [
        load_model(folder, rules=TRAIN, dtype=jnp.bfloat16, base_dtype="int8")[1]
        for folder in (source, tmp_path / "plain" / "m")
    ]
    for a, b in zip(*map(jax.tree.leaves, models), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert caplog.text.count("layers are quantized again to int8") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.weight_scale": None}, r"a\.weight_scale is missing"),
        ({"a.weight_shape": None}, r"a\.weight_shape is missing"),
        ({"a.weight_packed": None}, r"a\.weight_scale has no codes to which it belongs"),
        (
            {"a.weight_scale": np.ones((2, 3), BF16)},
            r"a\.weight_scale is \[2, 3\], expected \[2, 2",
        ),
        (
            {"a.weight_scale": np.ones((2, 2), "i8")},
            r"a\.weight_scale is int64, expected float64 or",
        ),
        (
            {"a.weight_zero_point": np.ones((2, 2), "i4")},
            r"zero_point is \[2, 2\], expected \[1, 2",
        ),
        ({"a.weight_shape": np.array([2, np.nan])}, r"a\.weight_shape is float64, expected int64"),
        ({"a.weight_shape": np.array([2, 9])}, r"a\.weight_packed is \[2, 1\], and .* is \[2, 9\]"),
        ({"a.weight_shape": np.array([-2, 8])}, r"a\.weight_shape is \[-2, 8\]"),
        ({"a.weight_g_idx": np.zeros(8, "i4")}, r"a\.weight_g_idx has no codes"),
        ({"a.weight": np.ones((2, 8), BF16)}, r"a\.weight has values and also codes"),
        ({"b.weight_scale": np.ones((2, 2), BF16)}, r"b\.weight_scale has no codes"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, message, tmp_path):
    parts = {k: v for k, v in (int4_parts() | change).items() if v is not None}
    with pytest.raises(ValueError, match=rf"not int4 \(pack-quantized\).*{message}"):
        find_tensors(write_folder(tmp_path, INT4, parts))


def test_zero_points_are_required_unless_codes_are_symmetric(tmp_path):
    parts = {k: v for k, v in int4_parts().items() if not k.endswith("zero_point")}
    config = group_config(
        "pack-quantized", num_bits=4, symmetric=False, strategy="group", group_size=4
    )
    with pytest.raises(ValueError, match=r"a\.weight_zero_point is missing"):
        find_tensors(write_folder(tmp_path, config, parts))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (dict(quant_method="gptq", bits=4), r"'gptq'.*these are read: FP8.*unquantized version"),
        (dict(quant_method="bitsandbytes"), "'bitsandbytes'"),
        (FP8_CONFIG | dict(fmt="e5m2"), "fmt of quantization_config is 'e5m2', and only e4m3"),
        (FP8_CONFIG | dict(expert_dtype="fp4"), "expert_dtype .* only fp8"),
        (FP8_CONFIG | dict(weight_block_size=[16]), "weight_block_size .* not a size of blocks"),
        (FP8_CONFIG | dict(rotation="hadamard"), "rotation of quantization_config is 'hadamard'"),
        (group_config("nvfp4-pack-quantized", type="float", num_bits=4), "'nvfp4-pack-quantized'"),
        (group_config("pack-quantized", num_bits=3), "num_bits 3, and these are read"),
        (group_config("pack-quantized", num_bits=4, actorder="group"), "actorder .*'group'"),
        (group_config("int-quantized", dynamic=True), "dynamic of weights"),
        (group_config("int-quantized", strategy="token"), "strategy of weights .*'token'"),
        (group_config("int-quantized", code_book=[1]), r"code_book of config_groups\.g\.weights"),
        (INT4 | dict(transform_config=dict(r1={})), "transform_config .* not known"),
        (INT4 | dict(sparsity_config=dict(format="sparse-24")), "sparsity_config .*'sparse-24'"),
        (INT4 | dict(config_groups={}), "no object config_groups"),
        (INT4 | dict(config_groups=dict(g=["Linear"])), "g of config_groups has no object weights"),
    ],
)
def test_other_schemes_are_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        read_scheme(dict(quantization_config=entry))


def test_schemes_of_both_levels_must_agree():
    assert read_scheme(dict(text_config=dict(quantization_config=INT4), quantization_config=INT4))
    with pytest.raises(ValueError, match="several different entries quantization_config"):
        read_scheme(
            dict(text_config=dict(quantization_config=FP8_CONFIG), quantization_config=INT4)
        )


@pytest.mark.parametrize(
    "value", [None, True, -1, 0.5, 2**70, "x", [], [1], [[2], 3], {}, {"a": 1}]
)
def test_odd_values_of_any_entry_are_errors_of_their_names_or_have_no_effect(value):
    weights = INT4["config_groups"]["g"]["weights"]
    changed = [FP8_CONFIG | {key: value} for key in FP8_CONFIG]
    changed += [INT4 | {key: value} for key in INT4]
    changed += [INT4 | dict(config_groups=dict(g=value)), INT4 | dict(config_groups=value), value]
    changed += [group_config("pack-quantized", **weights | {key: value}) for key in weights]
    for entry in changed:
        try:
            read_scheme(dict(quantization_config=entry))
        except ValueError as error:
            assert "quant" in str(error) or "config_groups" in str(error)
