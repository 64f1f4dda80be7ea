"""Model files with random damage: one ValueError that names the file, or a valid model.

Tests of jaxrl/json_text.py, hf_entries.py, safetensors.py, gguf/reader.py and their callers.
"""

import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxrl.data.tokenizer import load_tokenizer, stop_ids
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.gguf.folder import convert_gguf
from jaxrl.models.files.hf_config import FAMILIES, folder_config
from jaxrl.models.files.safetensors import map_tensor, read_header
from jaxrl.models.files.tensor_shapes import expected_shapes
from jaxrl.models.files.weight_files import find_tensors
from tests.file_damage import assert_named_or_valid, damage, fuzz, names, replaced, values
from tests.models.files.tiny_gguf import write_gguf

GOLDEN = Path(__file__).parents[1] / "golden"

TENSORS = {"a": np.ones((2, 3), np.float32), "b.weight": np.zeros((4,), np.float16)}
ENTRY = ("dtype", "shape", "data_offsets")
BAD_ENTRIES = values | replaced(ENTRY).map(
    lambda new: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | new
)


@fuzz(30, 5000, edit=damage())
def test_safetensors_with_damaged_bytes(folder, edit):
    path = folder / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(edit(path.read_bytes()))
    assert_named_or_valid(
        lambda: [map_tensor(info).sum() for info in read_header(path).values()], path.name
    )


@fuzz(30, 5000, entry=BAD_ENTRIES, whole=st.booleans())
def test_safetensors_with_any_header(folder, entry, whole):
    header = json.dumps(entry if whole else {"a": entry}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    assert_named_or_valid(lambda: read_header(path), path.name)


@fuzz(30, 5000, index=values, weight_map=st.dictionaries(st.text(max_size=4), values | names))
def test_an_index_with_any_content(folder, index, weight_map):
    save_file(TENSORS, folder / "model.safetensors")
    path = folder / "model.safetensors.index.json"
    for content in (index, {"weight_map": index}, {"weight_map": weight_map}):
        path.write_text(json.dumps(content))
        assert_named_or_valid(lambda: find_tensors(folder), folder.name)


CONFIGS = {
    name: json.loads((GOLDEN / name / "config.json").read_text())
    for name in ("llama3_rope", "qwen2", "gemma3", "qwen3_moe", "mixtral")
}
KEYS = sorted({key for config in CONFIGS.values() for key in config} | {"rope_scaling"})
ROPE_KEYS = ("rope_type", "rope_theta", "factor", "low_freq_factor", "full_attention")


@fuzz(
    25,
    1500,
    name=st.sampled_from(sorted(CONFIGS)),
    family=st.none() | st.sampled_from(sorted(FAMILIES)),
    new=replaced(tuple(KEYS)),
    rope=st.none() | replaced(ROPE_KEYS),
)
def test_a_config_with_any_values(folder, name, family, new, rope):
    config = CONFIGS[name] | new | ({"model_type": family} if family else {})
    if rope is not None:
        config["rope_parameters"] = dict(CONFIGS[name]["rope_parameters"]) | rope
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    assert_named_or_valid(lambda: decoder_specs(folder_config(folder)), path.name)


@fuzz(30, 5000, config=values, edit=damage())
def test_a_config_with_damaged_bytes(folder, config, edit):
    path = folder / "config.json"
    for data in (json.dumps(config).encode(), edit((GOLDEN / "llama/config.json").read_bytes())):
        path.write_bytes(data)
        assert_named_or_valid(
            lambda: expected_shapes(decoder_specs(folder_config(folder))), path.name
        )


@fuzz(25, 2000, edit=damage())
def test_a_gguf_file_with_damaged_bytes(folder, edit):
    good, path = folder / "good.gguf", folder / "tiny.gguf"
    if not good.exists():
        write_gguf(good)
    path.write_bytes(edit(good.read_bytes()))
    assert_named_or_valid(lambda: convert_gguf(path, folder), path.name)


@fuzz(25, 2000, edit=damage(), config=values)
def test_a_damaged_tokenizer(folder, edit, config):
    """tokenizer.json with damaged bytes, tokenizer_config.json and generation_config.json."""
    original = folder.parent / "tokenizer.json"
    if not original.exists():
        write_gguf(folder / "good.gguf")
        convert_gguf(folder / "good.gguf", folder)
        original.write_bytes((folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").write_bytes(edit(original.read_bytes()))

    def read() -> None:
        tokenizer = load_tokenizer(folder)
        (folder / "generation_config.json").write_text(json.dumps(config))
        stop_ids(folder, tokenizer)

    assert_named_or_valid(read, folder.name)
