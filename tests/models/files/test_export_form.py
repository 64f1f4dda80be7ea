"""Exports of image-and-text models: names, copied parts, processor files, joined experts.

Tests of jaxrl/models/files/export_form.py, hf_save.py, hf_stream.py and fused_experts.py.
"""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models.files.export_form import is_image_and_text
from jaxrl.models.files.hf_config import folder_config
from jaxrl.models.files.hf_load import log_skipped
from jaxrl.models.files.hf_save import SaveSettings, convert_model
from jaxrl.models.files.hf_stream import specs_by_path, stream_model
from jaxrl.models.files.quantized.tensors import read_tensor
from jaxrl.models.files.weight_files import find_tensors, frozen_parts
from jaxrl.models.spec import hf_names
from jaxrl.models.vision.towers import folder_tower

MODELS = Path(__file__).parents[1]
TOWERS = MODELS / "vision" / "golden"
RNG = np.random.default_rng(0)
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def stored(folder: Path) -> dict[str, tuple]:
    """(dtype, shape, bytes) of every tensor of a folder."""
    return {
        name: (w.dtype, w.shape, w.tobytes())
        for file in folder.glob("*.safetensors")
        for name, w in load_file(file).items()
    }


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def source(tmp_path) -> Path:
    """A model with a tower, an audio part and all files of a processor."""
    folder = Path(shutil.copytree(TOWERS / "qwen3_vl", tmp_path / "source"))
    (folder / "golden_tower.npz").unlink()
    tensors = load_file(folder / "model.safetensors")
    audio = {"audio_tower.conv.weight": RNG.standard_normal((2, 3)).astype(ml_dtypes.bfloat16)}
    save_file(tensors | audio, folder / "model.safetensors")
    for name in (*PROCESSOR, "chat_template.json", "tokenizer.json"):
        (folder / name).write_text(json.dumps({"of": name}))
    return folder


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen2_5_vl", "qwen3_5", "qwen3_vl"])
def test_an_unchanged_model_is_exported_bit_for_bit(name, tmp_path):
    """Names differ: language_model.model, model.layers, model.language_model."""
    convert_model(TOWERS / name, tmp_path / "out", max_shard_bytes=20_000)
    assert stored(tmp_path / "out") == stored(TOWERS / name)
    config = config_of(TOWERS / name)
    for part in (config, config["text_config"]):
        part.pop("dtype", None)
    assert config_of(tmp_path / "out") == config | dict(torch_dtype="float32")
    assert folder_tower(tmp_path / "out") == folder_tower(TOWERS / name)


def test_only_the_language_model_is_cast(source, tmp_path):
    convert_model(source, tmp_path / "out", dtype=ml_dtypes.bfloat16)
    before, after = stored(source), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    cast = {name for name in after if after[name] != before[name]}
    assert cast == {n for n in after if n.startswith(("model.language_model.", "lm_head."))}
    assert all(after[name][0] == ml_dtypes.bfloat16 for name in cast)
    assert config_of(tmp_path / "out")["torch_dtype"] == "bfloat16"


def test_the_files_of_the_processor_are_copied(source, tmp_path):
    convert_model(source, tmp_path / "out")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {path.name for path in source.iterdir()}
    for name in PROCESSOR:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_the_chat_template_of_a_run_replaces_the_one_that_transformers_prefers(source, tmp_path):
    convert_model(source, tmp_path / "out", settings=SaveSettings(chat_template="{{ x }}"))
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ x }}"
    assert not (tmp_path / "out" / "chat_template.json").exists()


def test_a_text_only_export_is_a_text_model(source, tmp_path):
    convert_model(source, tmp_path / "out", settings=SaveSettings(text_only=True))
    assert not any("visual" in n or "audio" in n for n in stored(tmp_path / "out"))
    assert not is_image_and_text(tmp_path / "out")
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()
    assert folder_config(tmp_path / "out") == folder_config(source)


def test_tensors_of_no_known_part_are_named(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"model.sonar.weight": np.ones(2, "f4")}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 unexpected: model\.sonar\.weight"):
        convert_model(source, tmp_path / "out")


def test_frozen_parts_are_those_outside_of_the_language_model(source):
    parts = {name.removeprefix("model.").partition(".")[0] for name in frozen_parts(source)}
    assert parts == {"visual", "audio_tower"}


def test_the_parts_of_gemma4_for_images_and_audio_are_listed_as_skipped(tmp_path, caplog):
    folder = Path(shutil.copytree(TOWERS / "gemma4", tmp_path / "gemma4"))
    tensors = load_file(folder / "model.safetensors")
    n_tower = sum("vision_tower." in name for name in tensors)
    audio = {f"model.{part}.x.weight": np.ones(2, "f4") for part in ("audio_tower", "embed_audio")}
    save_file(tensors | audio, folder / "model.safetensors")
    log_skipped(folder)
    listed = f"vision_tower ({n_tower} tensors), embed_vision (1 tensors), "
    listed += "audio_tower (1 tensors), embed_audio (1 tensors) are not loaded"
    assert n_tower > 9 and listed in caplog.text


def fused_image_model(folder: Path) -> Path:
    """Qwen3.5-MoE as an image-and-text model with all experts of a layer in one tensor."""
    golden = MODELS / "golden" / "qwen3_5_moe"
    tensors, fused = load_file(golden / "model.safetensors"), {}
    for name in [name for name in tensors if ".experts.0." in name]:
        stem, part = name.split(".experts.0.")
        n = len([k for k in tensors if k.startswith(f"{stem}.experts.") and k.endswith(part)])
        parts = [tensors.pop(f"{stem}.experts.{e}.{part}") for e in range(n)]
        fused[f"{stem}.experts.{part.removesuffix('.weight')}"] = np.stack(parts)
    for name in [name for name in fused if name.endswith("gate_proj")]:
        gate, up = fused.pop(name), fused.pop(name.replace("gate_proj", "up_proj"))
        fused[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([gate, up], axis=1)
    whole = {
        name.replace("model.", "model.language_model.", 1): w
        for name, w in (tensors | fused).items()
    }
    folder.mkdir()
    save_file(whole | {"model.visual.x": np.ones(2, "f4")}, folder / "model.safetensors")
    text = config_of(golden)
    config = dict(model_type="qwen3_5_moe", text_config=text, vision_config={"depth": 1})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_joined_experts_stay_joined(tmp_path):
    source = fused_image_model(tmp_path / "source")
    convert_model(source, tmp_path / "out")
    assert any(name.endswith("experts.gate_up_proj") for name in stored(source))
    assert stored(tmp_path / "out") == stored(source)


@pytest.mark.parametrize("name", ["qwen3_5_moe_images", "gpt_oss", "gemma4_moe"])
def test_a_stream_writes_joined_experts(name, tmp_path):
    """In the files of the model of a checkpoint, whose arrays come in parts."""
    source = MODELS / "golden" / name
    if name == "qwen3_5_moe_images":
        source = fused_image_model(tmp_path / "source")
    cfg = folder_config(source)
    specs = specs_by_path(cfg)
    values = {path: RNG.standard_normal(s.shape).astype("f4") for path, s in specs.items()}

    def halves(path):
        n = values[path].shape[0]
        rest = tuple(slice(0, size) for size in values[path].shape[1:])
        for rows in (slice(0, n // 2), slice(n // 2, n)):
            yield (rows, *rest), values[path][rows]

    dtypes = dict.fromkeys(specs, np.dtype(np.float32))
    stream_model(tmp_path / "out", cfg, dtypes, halves, source=source, settings=SaveSettings())
    assert stored(tmp_path / "out").keys() == stored(source).keys()
    found = find_tensors(tmp_path / "out")
    for path, spec in specs.items():
        for index, key in zip(np.ndindex(spec.stacked_shape), hf_names(spec), strict=True):
            np.testing.assert_array_equal(
                read_tensor(found[key]), spec.to_file(values[path][index])
            )
