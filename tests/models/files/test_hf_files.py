"""Hugging Face folders: loading into shardings, exporting, round trips, clear errors.

Tests of jaxrl/models/files/hf_load.py, hf_save.py, safetensors.py and atomic_folder.py.
"""

import errno
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models.decoder import init_model
from jaxrl.models.files.atomic_folder import atomic_folder
from jaxrl.models.files.hf_load import load_model, model_config
from jaxrl.models.files.hf_save import SaveSettings, save_model
from jaxrl.models.files.weight_files import find_tensors
from sharding import TRAIN, bytes_per_device, make_mesh

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = sorted(path.name for path in GOLDEN.iterdir())


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_weights(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("qwen2", "mixtral") else pytest.param(name, marks=pytest.mark.thorough)
        for name in MODELS
    ],
)
def test_import_and_export_keep_every_bit(name, one_device, tmp_path):
    for stacked in (False, True):
        cfg, model = load_model(GOLDEN / name, rules=TRAIN, stacked=stacked)
        save_model(tmp_path / "out", model, source=GOLDEN / name)
        assert_same_weights(weights(GOLDEN / name), weights(tmp_path / "out"))
        cfg_again, again = load_model(tmp_path / "out", rules=TRAIN, stacked=stacked)
        assert cfg_again == cfg
        for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no temporary folder is left


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_every_device_gets_its_slice(stacked):
    whole = weights(GOLDEN / "qwen2")["model.layers.1.self_attn.q_proj.weight"]
    with jax.set_mesh(make_mesh(replica=2, fsdp=2, tensor=2)):
        cfg, model = load_model(GOLDEN / "qwen2", rules=TRAIN, stacked=stacked)
        q = model.layers.attn.q.w if stacked else model.layers[1].attn.q.w
        for shard in q.addressable_shards:
            index = shard.index[1:] if stacked else shard.index
            local = np.asarray(shard.data)[1] if stacked else np.asarray(shard.data)
            np.testing.assert_array_equal(
                local, whole.reshape(-1, cfg.layers[1].mixer.H, cfg.D)[index]
            )
        assert bytes_per_device(q) * 4 == q.nbytes  # fsdp 2 x tensor 2; the replicas hold copies


@pytest.mark.parametrize(
    "stacked",
    [pytest.param(False, id="list", marks=pytest.mark.thorough), pytest.param(True, id="stacked")],
)
def test_experts_go_to_their_devices_and_back_into_files(stacked, tmp_path):
    files = weights(GOLDEN / "qwen3_moe")
    whole = np.stack([files[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] for e in range(8)])
    with jax.set_mesh(make_mesh(fsdp=2, expert=2, tensor=2)):
        _, model = load_model(GOLDEN / "qwen3_moe", rules=TRAIN, stacked=stacked)
        up = model.layers.mlp.up if stacked else model.layers[1].mlp.up
        for shard in up.addressable_shards:
            index = shard.index[1:] if stacked else shard.index
            local = np.asarray(shard.data)[1] if stacked else np.asarray(shard.data)
            np.testing.assert_array_equal(local, whole[index])
        assert bytes_per_device(up) * 8 == up.nbytes
        save_model(tmp_path / "out", model, source=GOLDEN / "qwen3_moe")
    assert_same_weights(files, weights(tmp_path / "out"))


def test_dtype_and_progress(one_device):
    seen = []
    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    _, model = load_model(GOLDEN / "llama", rules=TRAIN, dtype=jnp.bfloat16, on_progress=progress)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    expected = weights(GOLDEN / "llama")["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(model.embed), expected)
    done, total = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == total[0]
    assert total[0] == sum(w.nbytes for w in weights(GOLDEN / "llama").values())


def test_export_in_small_shards_with_an_index(tmp_path):
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        _, model = load_model(GOLDEN / "mistral", rules=TRAIN)
        save_model(tmp_path / "out", model, max_shard_bytes=40_000)
        files = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
        assert len(files) > 2 and all(file.stat().st_size < 45_000 for file in files)
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
        assert_same_weights(weights(GOLDEN / "mistral"), weights(tmp_path / "out"))
        load_model(tmp_path / "out", rules=TRAIN)
        files[1].unlink()
        with pytest.raises(ValueError, match=rf"lacks {files[1].name}"):
            load_model(tmp_path / "out", rules=TRAIN)


def test_export_casts_and_copies_the_tokenizer(one_device, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "llama", source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).write_text("{}")
    _, model = load_model(source, rules=TRAIN)
    save_model(tmp_path / "out", model, source=source, dtype=jnp.bfloat16)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in source.iterdir()} - {"golden.npz"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["eos_token_id"] == 2
    assert weights(tmp_path / "out")["model.norm.weight"].dtype == ml_dtypes.bfloat16


def test_a_failed_export_leaves_the_old_one_alone(one_device, tmp_path):
    _, model = load_model(GOLDEN / "llama", rules=TRAIN)
    save_model(tmp_path / "out", model)
    with pytest.raises(ValueError, match="contains a different model"):
        save_model(tmp_path / "out", model, source=GOLDEN / "qwen3")
    assert_same_weights(weights(GOLDEN / "llama"), weights(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_never_replaces_a_folder_without_a_model(one_device, tmp_path):
    (tmp_path / "thesis.txt").write_text("do not delete")
    _, model = load_model(GOLDEN / "llama", rules=TRAIN)
    with pytest.raises(ValueError, match="contains no model; choose another folder"):
        save_model(tmp_path, model)
    assert (tmp_path / "thesis.txt").exists()


def test_tensors_that_do_not_fit_are_listed_in_one_error(one_device, tmp_path):
    tensors = weights(GOLDEN / "llama")
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["lm_head.weight"] = np.zeros((255, 32), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
    with pytest.raises(ValueError) as error:
        load_model(tmp_path, rules=TRAIN)
    for line in (
        "1 missing: model.norm.weight",
        "1 unexpected: model.layers.7.mlp.up_proj.weight",
        "lm_head.weight is [255, 32], expected [256, 32]",
    ):
        assert line in str(error.value)


def test_an_unused_lm_head_next_to_tied_embeddings_is_ignored(one_device, tmp_path):
    tensors = weights(GOLDEN / "gemma2")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
        tmp_path / "model.safetensors",
    )
    shutil.copy(GOLDEN / "gemma2" / "config.json", tmp_path)
    _, model = load_model(tmp_path, rules=TRAIN)
    assert model.lm_head is None


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_an_image_checkpoint_is_found(prefix, one_device, tmp_path):
    renamed = {
        prefix + name.removeprefix("model."): w for name, w in weights(GOLDEN / "gemma3").items()
    }
    save_file(
        renamed | {"vision_tower.patch.weight": np.zeros((2, 2), np.float32)},
        tmp_path / "model.safetensors",
    )
    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    config = dict(model_type="gemma3", text_config=text, eos_token_id=[1, 106])
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, model = load_model(tmp_path, rules=TRAIN)
    save_model(tmp_path / "whole", model, source=tmp_path)
    assert_same_weights(weights(tmp_path), weights(tmp_path / "whole"))
    save_model(tmp_path / "out", model, source=tmp_path, settings=SaveSettings(text_only=True))
    assert_same_weights(weights(GOLDEN / "gemma3"), weights(tmp_path / "out"))
    for target in (tmp_path / "whole", tmp_path / "out"):
        assert model_config(target) == model_config(GOLDEN / "gemma3")
        assert json.loads((target / "config.json").read_text())["eos_token_id"] == [1, 106]


def test_a_truncated_file_is_named(one_device, tmp_path):
    shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
    data = (GOLDEN / "llama" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated at .*; download"):
        load_model(tmp_path, rules=TRAIN)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"metadata": {}}, "has no object weight_map"),
        ([1], "is a JSON list, not an object"),
        ({"weight_map": {"a": 1}}, "names '1', which is not a"),
        ({"weight_map": {"a": "../outside.safetensors"}}, r"names '\.\./outside\.safetensors'"),
        ({"weight_map": {"a": "/etc/passwd"}}, "names '/etc/passwd'"),
        ({"weight_map": {"a": "sub/x.safetensors"}}, "names 'sub/x.safetensors'"),
    ],
)
def test_an_index_names_only_files_of_its_folder(content, message, tmp_path, monkeypatch):
    (tmp_path / "outside.safetensors").write_bytes(b"secret")
    opened = []
    monkeypatch.setattr("jaxrl.models.files.weight_files.read_header", opened.append)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"model\.safetensors\.index\.json .*{message}"):
        find_tensors(folder)
    assert not opened


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "is a JSON list, not an object"),
        ({"a": 1}, "malformed header entry for 'a'"),
        ({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, "malformed header entry"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "malformed shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "is truncated at a"),
        ({"a": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}, "stores a as Q4"),
    ],
)
def test_a_malformed_safetensors_header_is_named(header, message, tmp_path):
    text, path = json.dumps(header).encode(), tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=rf"model\.safetensors .*{message}"):
        find_tensors(tmp_path)


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((2**31).to_bytes(8, "little"))
        file.truncate(2**32)  # a hole, without disk space
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "3", "{", "\x00", "[" * 100_000])
def test_a_config_that_is_not_an_object_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is .*; use the model's own config\.json"):
        model_config(tmp_path)


def test_folders_without_weights_or_config_are_named(one_device, tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; config\.model\.path must name"):
        model_config(tmp_path)
    shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        ValueError, match=r"neither .*pytorch_model\.bin is not read.*save the model"
    ):
        load_model(tmp_path, rules=TRAIN)


def test_heads_that_the_mesh_does_not_divide_are_rejected_before_reading(tmp_path):
    with (
        jax.set_mesh(make_mesh(tensor=4)),
        pytest.raises(ValueError, match=r"2 kv heads over tensor=4"),
    ):
        load_model(GOLDEN / "llama", rules=TRAIN)


@pytest.mark.parametrize(
    ("name", "message"),
    [("mixtral", r"4 experts over expert=8"), ("llama", r"no experts to shard over expert=8")],
)
def test_experts_that_the_mesh_does_not_divide_are_rejected(name, message):
    with jax.set_mesh(make_mesh(expert=8)), pytest.raises(ValueError, match=message):
        load_model(GOLDEN / name, rules=TRAIN)


def test_a_randomly_initialized_model_exports_its_config(one_device, tmp_path):
    cfg = model_config(GOLDEN / "qwen3")
    model = init_model(cfg, seed=0, rules=TRAIN)
    save_model(tmp_path / "out", model)
    assert model_config(tmp_path / "out") == cfg
    _, again = load_model(tmp_path / "out", rules=TRAIN)
    np.testing.assert_array_equal(np.asarray(model.embed), np.asarray(again.embed))


def test_a_full_disk_names_the_folder_and_leaves_nothing(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write raises it: without a path
    with (
        pytest.raises(OSError, match=r"no room for .*/model; free disk space, or choose"),
        atomic_folder(tmp_path / "model"),
    ):
        raise full
    assert not [*tmp_path.iterdir()]
