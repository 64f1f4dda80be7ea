"""Tests of jaxrl/check_model.py and jaxrl/config/arguments/check_model.py."""

import argparse
import json
import shutil
import typing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl import check_model
from jaxrl.check_model import (
    MIXER_NAMES,
    check_rows,
    engine_row,
    greedy_row,
    layers_text,
    main,
)
from jaxrl.models.config import LayerConfig
from jaxrl.models.files.hf_load import model_config
from tests.engine.engine_cases import FAMILIES, HYBRID

GOLDEN = Path(__file__).parent / "models" / "golden"
SCORES = Path(__file__).parent / "models" / "golden_scores"
TOWERS = Path(__file__).parent / "models" / "vision" / "golden"


def rows_of(folder: Path) -> dict[str, check_model.CheckRow]:
    return {row.name: row for row in check_rows(str(folder), seed=0)}


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.thorough) for n in ("llama", "qwen3_5", "gemma2")]
)
def test_a_sound_model_passes_every_check(name, one_device):
    rows = rows_of(GOLDEN / name)
    names = ("logits", "export", "engine", "greedy")
    assert {name: rows[name].passed for name in names} == dict.fromkeys(names, True)
    assert rows["greedy"].text.startswith("36 of 36 tokens")  # 3 prompts of 12 tokens
    assert f"{len(load_file(GOLDEN / name / 'model.safetensors'))} tensors" in rows["export"].text


def test_the_program_fails_with_the_checks_that_find_a_difference(tmp_path, monkeypatch, capsys):
    """Weights that differ from those of the golden file, and an export that changes them."""
    folder = copy_of(GOLDEN / "llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"model.norm.weight": tensors["model.norm.weight"] * 1.01},
        folder / "model.safetensors",
    )
    monkeypatch.setattr(
        check_model,
        "save_model",
        lambda target, params, source: copy_of(GOLDEN / "llama", target),
    )
    monkeypatch.setattr(check_model, "check_engine", lambda model, seed: iter(()))
    with pytest.raises(SystemExit) as ended:
        main(argparse.Namespace(model=str(folder), seed=0))
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "logits      FAILED: largest difference from transformers" in shown
    assert "export      FAILED: 1 tensors differ: model.norm.weight" in shown
    assert "layers      2 attention\nparameters  31,904\ncontext     128 tokens\n" in shown


def test_differences_of_the_engine_fail():
    assert engine_row(np.array([0.0, 0.0])).text.endswith("equal bit for bit")
    assert engine_row(np.array([0.0, 9e-5])).passed
    assert engine_row(np.array([0.0, 2e-4])).passed is False
    assert engine_row(np.array([0.0, np.nan])).passed is False
    row = greedy_row(np.array([0.0, 1e-3, np.nan]))
    assert row.passed is False and row.text.startswith("1 of 3 tokens")


@pytest.mark.thorough
def test_a_classifier_has_no_engine_checks(one_device):
    rows = rows_of(SCORES / "qwen2")
    assert rows["family"].text == "qwen2, sequence classifier"
    assert rows["scores"].passed and rows["export"].passed
    for name in ("engine", "greedy"):
        assert rows[name].passed is None
        assert rows[name].text.startswith("not checked: a sequence classifier has no logits")


def test_every_kind_of_mixer_has_a_name():
    kinds = typing.get_args(typing.get_type_hints(LayerConfig)["mixer"])
    assert set(MIXER_NAMES) == set(kinds) and all(hasattr(kind, "window") for kind in kinds)


def test_layers_are_counted_by_kind_and_period():
    assert layers_text(HYBRID) == "2 gated DeltaNet + 1 attention, x 2"
    assert layers_text(FAMILIES["qwen3_moe"]) == "2 attention with 3 of 8 experts"
    assert layers_text(FAMILIES["gemma2"]) == "1 attention over 32 tokens; 1 attention"
    assert layers_text(model_config(GOLDEN / "qwen3_5")) == (
        "1 gated DeltaNet; 1 attention; 1 gated DeltaNet"
    )


def test_bad_folders_have_a_message_and_the_status_1(tmp_path, capsys):
    def error(folder: Path) -> str:
        with pytest.raises(SystemExit) as ended:
            main(argparse.Namespace(model=str(folder), seed=0))
        assert ended.value.code == 1
        return capsys.readouterr().err

    assert "there is no model folder" in error(tmp_path / "none")
    assert "has neither model.safetensors nor" in error(tmp_path)
    folder = copy_of(GOLDEN / "llama", tmp_path / "model")
    (folder / "golden.npz").write_bytes(b"no archive")
    assert "golden.npz has not the arrays tokens and logits" in error(folder)
    np.savez(folder / "golden.npz", tokens=np.zeros((1, 3), np.int32))
    assert "logits is not a file in the archive" in error(folder)
    (folder / "config.json").unlink()
    assert f"error: {folder} has no config.json" in error(folder)


@pytest.mark.thorough
def test_a_golden_file_of_another_shape_fails(one_device, tmp_path):
    folder = copy_of(GOLDEN / "llama", tmp_path / "model")
    np.savez(folder / "golden.npz", tokens=np.zeros((1, 3), np.int32), logits=np.zeros((1, 3, 7)))
    model = check_model.LoadedModel(
        folder, *check_model.load_model(folder, rules=check_model.TRAIN)
    )
    row = check_model.check_golden(model)
    assert row.passed is False and "(1, 3, 7), the model (1, 3, 256)" in row.text


def test_a_model_without_a_tower_has_no_rows_of_one():
    assert list(check_model.tower_rows(GOLDEN / "llama")) == []


def test_a_tower_that_is_refused_is_not_checked(tmp_path):
    folder = copy_of(TOWERS / "gemma4", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["attention_bias"] = True
    (folder / "config.json").write_text(json.dumps(config))
    (row,) = check_model.tower_rows(folder)
    assert row.passed is None
    assert "not checked: " in row.text
    assert "attention_bias is True" in row.text


@pytest.mark.thorough
def test_a_tower_that_differs_from_its_golden_file_fails(tmp_path, one_device):
    source = TOWERS / "gemma3"
    tower, features, tensors = check_model.tower_rows(source)
    assert "an image of 6 x 6 patches: 9 tokens" in tower.text
    assert (features.passed, tensors.passed) == (True, True)
    folder = copy_of(source, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    name = "vision_tower.post_layernorm.bias"
    save_file(stored | {name: stored[name] + 1}, folder / "model.safetensors")
    _, features, tensors = check_model.tower_rows(folder)
    assert (features.passed, tensors.passed) == (False, True)
