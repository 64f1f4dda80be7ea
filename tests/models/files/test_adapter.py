"""Adapters in PEFT's format against those of PEFT (scripts/make_golden_adapters.py)."""

import dataclasses
import itertools
import json
import re
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl import convert
from jaxrl.models.config import LoRA
from jaxrl.models.files.adapter import (
    adapter_config,
    adapter_tensors,
    load_with_adapters,
    save_adapter,
    warn_of_shared_experts,
)
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.files.hf_save import param_tensors
from jaxrl.models.files.peft_config import peft_config
from jaxrl.models.lora import merge
from sharding import make_mesh
from sharding.rules import TRAIN
from tests.marks import graded
from tests.models.test_parity import GOLDEN, golden, packed_logits
from tests.models.test_scores import packed_scores

ADAPTERS = GOLDEN.parent / "golden_adapters"
MODELS = sorted(path.name for path in ADAPTERS.iterdir() if (GOLDEN / path.name).is_dir())
DORA = sorted(path.name for path in ADAPTERS.glob("*_dora"))
EXPERTS = sorted(path.name for path in ADAPTERS.glob("*_experts"))
TABLES = sorted(path.name for path in ADAPTERS.glob("*_tables"))  # embedding, output head, q_proj
SCORES = sorted(path.name for path in ADAPTERS.glob("*_scores"))  # of classifiers
ONE_KV_HEAD = ("gemma4", "gemma4_moe")  # in their global layers


def base_of(name):
    """The checkpoint of an adapter."""
    folder = GOLDEN.parent / "golden_scores" if name in SCORES else GOLDEN
    return folder / re.sub("_(dora|experts|tables|scores)$", "", name)


def load(name, folder=None, *, stacked=False, **changes):
    """The checkpoint with PEFT's adapter; `changes` are of the adapters that the run asks for."""
    folder = folder or ADAPTERS / name
    lora = dataclasses.replace(adapter_config(ADAPTERS / name), **changes)
    base = base_of(name)
    heads = ("score",) if name in SCORES else ("vocab",)
    cfg = dataclasses.replace(model_config(base), lora=lora, stacked=stacked, heads=heads)
    return load_with_adapters(base, TRAIN, cfg, jnp.float32, seed=0, adapter=str(folder))


@pytest.mark.parametrize(
    ("name", "stacked"),
    graded(
        itertools.product((*MODELS, *DORA, *EXPERTS, *TABLES), (False, True)),
        default=[("llama_tables", False)],
        thorough=[
            *((name, False) for name in (*MODELS, *DORA, "mixtral_experts")),
            ("qwen3_moe", True),
            ("qwen3_moe_experts", True),
        ],
    ),
)
def test_logits_equal_those_of_peft(name, stacked, one_device):
    tokens, plain = golden(base_of(name).name)
    expected = np.load(ADAPTERS / name / "golden.npz")["logits"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model = load(name, stacked=stacked)
    logits = np.asarray(packed_logits(model, tokens, jnp.ones_like(tokens), positions))[:, ::5]
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
    assert np.abs(logits - plain[:, ::5]).max() > 0.1


@pytest.mark.parametrize(
    ("name", "stacked"),
    graded(itertools.product(SCORES, (False, True)), default=[("qwen2_scores", True)]),
)
def test_scores_equal_those_of_peft(name, stacked, one_device):
    saved = np.load(base_of(name) / "golden.npz")
    tokens, expected = saved["tokens"], np.load(ADAPTERS / name / "golden.npz")["scores"]
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    scores = packed_scores(load(name, stacked=stacked), tokens, np.ones_like(tokens), positions)
    np.testing.assert_allclose(np.asarray(scores), expected, atol=1e-4, rtol=1e-4)
    assert np.abs(expected - saved["scores"]).max() > 0.1


@pytest.mark.parametrize(
    ("name", "sizes"),
    graded(
        [
            (name, sizes)
            for name in (*MODELS, *DORA, *EXPERTS, *TABLES, *SCORES)
            for sizes in ({}, dict(fsdp=2) if name in ONE_KV_HEAD else dict(fsdp=2, tensor=2))
        ],
        default=[
            *itertools.product(("llama", "qwen2_dora"), ({}, dict(fsdp=2, tensor=2))),
            ("llama_tables", dict(fsdp=2, tensor=2)),
            ("qwen2_scores", {}),
            ("qwen3_vl", {}),
        ],
    ),
)
def test_a_saved_adapter_has_the_tensors_of_pefts_file(name, sizes, tmp_path):
    with jax.set_mesh(make_mesh(**sizes)):
        model = load(name, stacked=bool(sizes))
        save_adapter(tmp_path / "adapter", model, base="base", source=base_of(name))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    written = load_file(ADAPTERS / name / "adapter_model.safetensors")
    copies = {tensor for tensor in written if "base_layer" in tensor}
    assert saved.keys() == written.keys() - copies and len(copies) == 2 * (name in TABLES)
    for tensor, values in written.items():
        if tensor in copies:
            continue
        np.testing.assert_array_equal(saved[tensor], values)
    assert adapter_config(tmp_path / "adapter") == adapter_config(ADAPTERS / name)


def test_the_merged_weights_are_those_that_peft_adds_up(one_device):
    model = load("llama")
    merged = {tensor.name: tensor.read() for tensor in param_tensors(model, None)}
    base = load_file(GOLDEN / "llama" / "model.safetensors")
    adapter = load_file(ADAPTERS / "llama" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    name = "model.layers.1.self_attn.o_proj."
    a, b = (adapter[f"base_model.model.{name}lora_{part}.weight"] for part in "AB")
    weight = base[f"{name}weight"] + 1.5 * b @ a
    np.testing.assert_allclose(merged[f"{name}weight"], weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(merged["model.norm.weight"], base["model.norm.weight"])


def test_merged_dora_weights_have_the_magnitudes_as_norms(one_device):
    merged = {tensor.name: tensor.read() for tensor in param_tensors(load("qwen2_dora"), None)}
    base = load_file(GOLDEN / "qwen2" / "model.safetensors")
    adapter = load_file(ADAPTERS / "qwen2_dora" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.k_proj."
    a, b = (adapter[f"base_model.model.{name}lora_{part}.weight"] for part in "AB")
    magnitude = adapter[f"base_model.model.{name}lora_magnitude_vector"]
    changed = base[f"{name}weight"] + 1.5 * b @ a  # alpha 6, rank 4
    weight = magnitude[:, None] * changed / np.linalg.norm(changed, axis=1, keepdims=True)
    np.testing.assert_allclose(merged[f"{name}weight"], weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(merged[f"{name}bias"], base[f"{name}bias"])


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_dora",
        "llama_tables",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("llama", *EXPERTS)),
    ],
)
def test_weights_merged_on_devices_are_those_of_a_merged_export(name, one_device):
    model = load(name)
    merged = merge(model)
    assert merged.cfg.lora is None
    wanted = {tensor.name: tensor.read() for tensor in param_tensors(model, None)}
    for tensor in param_tensors(merged, None):
        np.testing.assert_allclose(tensor.read(), wanted[tensor.name], rtol=1e-5, atol=1e-6)


def test_merged_tables_are_those_that_peft_adds_up(tmp_path, one_device):
    folder = Path(shutil.copytree(ADAPTERS / "llama_tables", tmp_path / "adapter"))
    convert.main(
        convert.read([str(GOLDEN / "llama"), str(tmp_path / "merged"), f"--adapter={folder}"])
    )
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(GOLDEN / "llama" / "model.safetensors")
    weights = load_file(folder / "adapter_model.safetensors")
    a, b = (weights[f"base_model.model.model.embed_tokens.lora_embedding_{x}"] for x in "AB")
    want = base["model.embed_tokens.weight"] + 1.5 * (b @ a).T  # alpha 6, rank 4
    np.testing.assert_allclose(merged["model.embed_tokens.weight"], want, rtol=1e-5, atol=1e-6)
    a, b = (weights[f"base_model.model.lm_head.lora_{x}.weight"] for x in "AB")
    want = base["lm_head.weight"] + 1.5 * b @ a
    np.testing.assert_allclose(merged["lm_head.weight"], want, rtol=1e-5, atol=1e-6)


def test_a_trained_copy_of_a_base_table_is_refused(tmp_path, capsys):
    folder = Path(shutil.copytree(ADAPTERS / "llama_tables", tmp_path / "adapter"))
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    weights["base_model.model.lm_head.base_layer.weight"][3, 4] += 1
    save_file(weights, path)
    with pytest.raises(SystemExit):
        convert.main(
            convert.read([str(GOLDEN / "llama"), str(tmp_path / "merged"), f"--adapter={folder}"])
        )
    assert "that is not the base model's lm_head.weight" in capsys.readouterr().err


def test_convert_merges_an_adapter(tmp_path, capsys, one_device):
    target = tmp_path / "merged"
    convert.main(
        convert.read([str(GOLDEN / "llama"), str(target), f"--adapter={ADAPTERS / 'llama'}"])
    )
    assert "merged, llama, " in capsys.readouterr().out
    written = load_file(target / "model.safetensors")
    wanted = {tensor.name: tensor.read() for tensor in param_tensors(load("llama"), None)}
    assert written.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(written[name], values, err_msg=name)
    options = [str(GOLDEN / "qwen3"), str(tmp_path / "no"), f"--adapter={ADAPTERS / 'llama'}"]
    with pytest.raises(SystemExit):
        convert.main(convert.read(options))
    assert "is of another model" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_dropout_of_its_training_does_not_change_an_adapter(tmp_path):
    folder = Path(shutil.copytree(ADAPTERS / "llama", tmp_path / "adapter"))
    changed_config(lora_dropout=0.1)(folder)
    assert adapter_config(folder) == adapter_config(ADAPTERS / "llama")


@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
def test_the_names_of_other_classes_are_those_of_an_image_and_text_model(prefix, tmp_path):
    """Those of the language model alone, and those of transformers before version 4.52."""
    folder = Path(shutil.copytree(ADAPTERS / "qwen3_vl", tmp_path / "adapter"))
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    whole = "base_model.model.model.language_model."
    assert all(name.startswith(whole) for name in tensors)
    save_file({k.replace(whole, f"base_model.model.{prefix}"): v for k, v in tensors.items()}, path)
    wanted, found = adapter_tensors(ADAPTERS / "qwen3_vl"), adapter_tensors(folder)
    assert (
        found.keys() == wanted.keys() and "model.layers.0.self_attn.q_proj.lora_A.weight" in found
    )
    assert adapter_config(folder) == adapter_config(ADAPTERS / "qwen3_vl")


def test_the_adapter_of_a_text_model_has_its_names_and_a_list_of_targets(tmp_path, one_device):
    save_adapter(tmp_path / "adapter", load("qwen3_vl"), base="base")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in saved)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(adapter_config(ADAPTERS / "qwen3_vl").targets)


def test_the_targets_of_an_image_and_text_adapter_are_not_those_of_its_tower(tmp_path, one_device):
    source = base_of("qwen2_5_vl")
    save_adapter(tmp_path / "adapter", load("qwen2_5_vl"), base="base", source=source)
    pattern = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    pattern = pattern["target_modules"]
    assert re.fullmatch(pattern, "model.language_model.layers.0.mlp.gate_proj")
    assert not re.fullmatch(pattern, "model.visual.blocks.0.mlp.gate_proj")
    assert not re.fullmatch(pattern, "model.language_model.layers.0.input_layernorm")
    assert not re.fullmatch(pattern, "lm_head")
    tables = peft_config(LoRA(4, 6.0, False, False, ("lm_head",)), ("vocab",), "base", whole=True)
    assert re.fullmatch(tables["target_modules"], "lm_head")


def change_tower(folder):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tower = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
    save_file(tensors | {tower: np.zeros((4, 16), np.float32)}, path)


def name_twice(folder):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {name.replace("language_model.", ""): tensors[name]}, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            change_tower,
            r"outside of the language model, which are frozen here \(1 tensors: .*visual",
        ),
        (name_twice, "has model.layers.0.self_attn.q_proj.lora_A.weight twice"),
    ],
)
def test_an_image_and_text_adapter_that_cannot_be_read_is_refused(change, words, tmp_path):
    folder = Path(shutil.copytree(ADAPTERS / "qwen3_vl", tmp_path / "adapter"))
    change(folder)
    with pytest.raises(ValueError, match=words):
        adapter_config(folder)


def changed_config(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def drop_tensor(folder):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, path)


def remove_config(folder):
    (folder / "adapter_config.json").unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove_config, "no adapter_config.json"),
        (changed_config(peft_type="IA3"), "only LORA is supported"),
        (changed_config(use_dora=True), "dora True, not False; set config.lora.rank"),
        (changed_config(init_lora_weights="pissa_niter_4"), "path_initial_model_for"),
        (changed_config(bias="all"), "bias='all'.* merge the adapter into its base model"),
        (changed_config(target_modules=None), "a list of names"),
        (changed_config(r=8), "rank 8, not 4"),
        (changed_config(lora_alpha=1), "alpha 1.0, not 6.0"),
        (changed_config(target_modules=["q_proj"]), "targets"),
        (drop_tensor, "1 tensors are missing.*down_proj.lora_A"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(change, words, tmp_path, one_device):
    folder = Path(shutil.copytree(ADAPTERS / "llama", tmp_path / "adapter"))
    change(folder)
    with pytest.raises(ValueError, match=words):
        load("llama", folder)


def test_an_adapter_of_another_base_model_is_refused(one_device):
    with pytest.raises(ValueError, match="another model"):
        load("qwen3", ADAPTERS / "llama")


def test_a_shared_expert_that_peft_misreads_is_named(tmp_path):
    names = ["model.layers.0.mlp.shared_expert.up_proj.lora_A.weight", "model.norm.weight"]
    decoder = model_config(GOLDEN / "qwen3_next")
    with pytest.warns(UserWarning, match=r"PEFT 0\.21 does not read 1 tensors .*jaxrl\.convert"):
        warn_of_shared_experts(tmp_path, names, decoder)
    glm = [names[0].replace("shared_expert", "shared_experts")]
    with pytest.warns(UserWarning, match="PEFT 0.21 does not read 1 tensors"):
        warn_of_shared_experts(tmp_path, glm, model_config(GOLDEN / "glm4_moe"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_shared_experts(tmp_path, names[1:], decoder)
        warn_of_shared_experts(tmp_path, names, model_config(GOLDEN / "qwen3_5_moe"))
