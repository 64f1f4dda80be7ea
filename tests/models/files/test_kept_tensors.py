"""Tensors that are no parameters and that exports keep: the drafter of Qwen3.5 and Qwen3-Next.

Tests of jaxrl/models/files/weight_files.py, hf_save.py and kept_record.py.
"""

import dataclasses
import json
import warnings
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.check_model import LoadedModel, check_export
from jaxrl.models.files.atomic_folder import write_json
from jaxrl.models.files.export_form import export_form
from jaxrl.models.files.hf_config import folder_config
from jaxrl.models.files.hf_load import load_model
from jaxrl.models.files.hf_save import SaveSettings, convert_model, copied_parts, save_model
from jaxrl.models.files.kept_record import RECORD, kept_record, warn_of_change, write_record
from sharding import TRAIN

GOLDEN = Path(__file__).parents[1] / "golden"
RNG = np.random.default_rng(0)
DRAFTER = {
    "mtp.fc.weight": RNG.standard_normal((4, 8)).astype(ml_dtypes.bfloat16),
    # All experts in one tensor, which a parameter would be split into.
    "mtp.layers.0.mlp.experts.gate_up_proj": RNG.standard_normal((2, 6, 4)).astype(np.float16),
    "mtp.norm.weight": np.array([1, np.nan, -0.0], np.float32),
}
ENTRIES = dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)


def folder_with(tensors, target: Path, family: str = "qwen3_5") -> Path:
    """An image-and-text model with these tensors next to those of the golden language model."""
    target.mkdir()
    golden = load_file(GOLDEN / family / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): w for name, w in golden.items()}
    images = {"model.visual.pos_embed.weight": np.ones(2, np.float32)}
    save_file(named | images | tensors, target / "model.safetensors")
    text = json.loads((GOLDEN / family / "config.json").read_text()) | ENTRIES
    config = dict(model_type=family, text_config=text, vision_config={})
    (target / "config.json").write_text(json.dumps(config))
    return target


def stored(folder: Path) -> dict[str, tuple]:
    """(file, dtype, shape, bytes) of every tensor of a folder."""
    return {
        name: (file.name, w.dtype, w.shape, w.tobytes())
        for file in folder.glob("*.safetensors")
        for name, w in load_file(file).items()
    }


def assert_drafter(folder: Path) -> None:
    found = stored(folder)
    drafter = {name: found[name][1:] for name in found if name.startswith("mtp")}
    assert drafter == {name: (w.dtype, w.shape, w.tobytes()) for name, w in DRAFTER.items()}
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    assert {name: config.get(name) for name in ENTRIES} == ENTRIES


def test_the_drafter_is_exported_unchanged(one_device, tmp_path):
    source = folder_with(DRAFTER, tmp_path / "source")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg, model = load_model(source, rules=TRAIN)
    text, whole = SaveSettings(text_only=True), SaveSettings()
    for name, settings in (("whole", whole), ("a", text)):
        target = tmp_path / name
        options = dict(dtype=jnp.bfloat16, max_shard_bytes=30_000, settings=settings)
        save_model(target, model, source=source, **options)
        assert_drafter(target)
        assert any("visual" in name for name in stored(target)) == (settings is whole)
    convert_model(tmp_path / "a", tmp_path / "b", dtype=np.float16)
    assert_drafter(tmp_path / "b")
    assert stored(tmp_path / "b")["model.norm.weight"][1] == np.float16
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: place[0] for name, place in stored(tmp_path / "a").items()}
    row = check_export(LoadedModel(source, cfg, model))
    assert row.passed and row.text.endswith("tensors equal bit for bit; 4 more copied unchanged")


def glm_folder(target: Path, n_layers: int) -> tuple[Path, dict[str, np.ndarray]]:
    """(a GLM model with the tensors of a drafter after its 3 layers, these tensors)."""
    target.mkdir()
    drafter = {
        "model.layers.3.eh_proj.weight": RNG.standard_normal((4, 8)).astype(ml_dtypes.bfloat16),
        "model.layers.3.mlp.experts.gate_up_proj": RNG.standard_normal((2, 6, 4)).astype("f2"),
        "model.layers.3.mlp.gate.e_score_correction_bias": np.ones(2, np.float32),
    }
    golden = load_file(GOLDEN / "glm4_moe" / "model.safetensors")
    save_file(golden | drafter, target / "model.safetensors")
    config = json.loads((GOLDEN / "glm4_moe" / "config.json").read_text())
    config["num_nextn_predict_layers"] = n_layers
    (target / "config.json").write_text(json.dumps(config))
    return target, drafter


def test_the_drafter_layers_of_glm_are_exported_unchanged(one_device, tmp_path):
    """A cast of the model to bfloat16 leaves the corrections in float32."""
    source, drafter = glm_folder(tmp_path / "source", 1)
    _, model = load_model(source, rules=TRAIN, dtype=jnp.bfloat16)
    save_model(tmp_path / "a", model, source=source)
    convert_model(source, tmp_path / "b", dtype=ml_dtypes.bfloat16)
    before = stored(source)
    for folder in (tmp_path / "a", tmp_path / "b"):
        found = stored(folder)
        assert found.keys() == before.keys()
        assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
        for name, tensor in found.items():
            if name in drafter or name.endswith("e_score_correction_bias"):
                assert tensor[1:] == before[name][1:]
            else:
                assert tensor[1] == ml_dtypes.bfloat16


def test_layers_after_the_last_one_are_refused_if_the_config_has_no_drafter(tmp_path):
    source, _ = glm_folder(tmp_path / "source", 0)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight"):
        convert_model(source, tmp_path / "out")


def test_a_classifier_has_no_drafter(tmp_path):
    source = folder_with(DRAFTER, tmp_path / "source")
    cfg = folder_config(source)
    assert [tensor.name for tensor in copied_parts(export_form(cfg, source), ())] == [
        "mtp.fc.weight",
        "mtp.norm.weight",
        "model.visual.pos_embed.weight",
        "mtp.layers.0.mlp.experts.gate_up_proj",
    ]
    assert not export_form(dataclasses.replace(cfg, heads=("score",)), source).copied


def test_tensors_of_no_known_part_are_refused(tmp_path):
    source = folder_with({"mtp2.norm.weight": np.ones(2, np.float32)}, tmp_path / "source")
    with pytest.raises(ValueError, match=r"1 unexpected: mtp2\.norm\.weight"):
        convert_model(source, tmp_path / "out")


def test_an_index_without_a_tensor_of_the_drafter_is_refused(tmp_path):
    source = folder_with(DRAFTER, tmp_path / "source")
    convert_model(source, tmp_path / "out", max_shard_bytes=30_000)
    path = tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["mtp.fc.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"differ in mtp\.fc\.weight"):
        convert_model(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "has 1 of the tensors that exports copy .*mtp.* in place of 4"),
        (DRAFTER | {"mtp.norm.weight": np.ones(3, np.float32)}, "has 4 .* with other values"),
    ],
    ids=["removed", "changed"],
)
def test_a_folder_that_changed_since_the_start_of_a_run_is_named(change, message, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    warn_of_change(run, tmp_path / "of a run of an earlier version")
    source = folder_with(DRAFTER, tmp_path / "source")
    write_record(run, source, is_new=True)
    other = folder_with(change, tmp_path / "other")
    write_record(run, other, is_new=False)  # a resumed run keeps the record of its start
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_change(run, source)
    with pytest.warns(UserWarning, match=rf"{message}.*restore the folder and run python -m jaxrl"):
        warn_of_change(run, other)


def test_a_record_without_the_tower_is_that_of_an_unchanged_folder(tmp_path):
    folder = Path(__file__).parents[1] / "vision" / "golden" / "qwen3_vl"
    record, before = kept_record(folder), kept_record(folder, text_only=True)
    assert record["n_tensors"] > before["n_tensors"] == 0
    write_json(tmp_path / RECORD, before)  # as earlier versions wrote it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_change(tmp_path, folder)
    write_json(tmp_path / RECORD, before | {"n_tensors": 3})
    with pytest.warns(UserWarning, match="has changed"):
        warn_of_change(tmp_path, folder)
