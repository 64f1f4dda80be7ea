"""Model files with random damage: one ValueError that names the file, or a valid model.

Tests of jaxrl/data/json_object.py, hf_entries.py, safetensors.py, gguf_reader.py and their callers.
"""

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxrl.data.tokenizer import load_tokenizer, stop_ids
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.gguf import convert_gguf
from jaxrl.models.files.hf_config import FAMILIES, folder_config
from jaxrl.models.files.hf_load import find_tensors
from jaxrl.models.files.safetensors import map_tensor, read_header
from jaxrl.models.files.tensor_shapes import expected_shapes
from tests.models.files.tiny_gguf import write_gguf

GOLDEN = Path(__file__).parents[1] / "golden"
MAX_ALLOCATION = 100_000_000
HEADER = 2048  # most damage hits the first bytes, where counts and lengths are
ABSURD = [0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**62, 2**63 - 1, 2**64 - 1]

names = st.sampled_from(
    ["../../etc/passwd", "/etc/passwd", "a/../b.safetensors", "", ".", "\0", "x"]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([*ABSURD, -1, 10**400, 1e308, -0.0, float("nan"), float("inf")])
    | st.text(max_size=8)
    | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@st.composite
def damage(draw) -> Callable[[bytes], bytes]:
    """One to four edits of a file's bytes."""
    edits = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["cut", "byte", "word", "long", "delete", "repeat"]),
                st.floats(0, 1, exclude_max=True),
                st.booleans(),
                st.integers(0, 255),
                st.sampled_from(ABSURD),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def apply(data: bytes) -> bytes:
        for kind, place, near, byte, number in edits:
            at = int(place * (min(len(data), HEADER) if near else len(data)))
            head, tail = data[:at], data[at:]
            data = {
                "cut": head,
                "byte": head + bytes([byte]) + tail[1:],
                "word": head + struct.pack("<I", number % 2**32) + tail[4:],
                "long": head + struct.pack("<Q", number) + tail[8:],
                "delete": head + tail[byte:],
                "repeat": head + tail[:byte] + tail,
            }[kind]
        return data

    return apply


@st.composite
def replaced(draw, keys: tuple[str, ...]) -> dict:
    """One to three entries with values of any type."""
    return draw(st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3))


def assert_named_or_valid(read: Callable[[], object], name: str) -> None:
    """`read` returns, or raises ValueError with `name`; it never allocates much."""
    tracemalloc.start()
    try:
        read()
    except ValueError as error:
        assert name in str(error), error
        assert len(str(error)) < 3000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_ALLOCATION


def fuzz(n: int, n_slow: int, **strategies):
    """Two tests of one property: a few examples by default, many with -m slow."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

    def make(check):
        @pytest.mark.parametrize(
            "n_examples", [n, pytest.param(n_slow, marks=pytest.mark.slow)], ids=["few", "many"]
        )
        def test(n_examples, tmp_path):
            @settings(
                max_examples=n_examples,
                deadline=None,
                database=None,
                derandomize=n_examples == n,
                suppress_health_check=checks,
            )
            @given(**strategies)
            def run(**drawn):
                check(tmp_path, **drawn)

            run()

        test.__doc__ = check.__doc__
        return test

    return make


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
    3000,
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
