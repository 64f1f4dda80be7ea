"""Adapters of vision towers in PEFT's format, both ways (scripts/make_golden_adapters.py)."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.models.files.adapted_tower import load_adapted_tower
from jaxrl.models.files.adapter import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    adapter_config,
    load_with_adapters,
    save_adapter,
    with_adapted_tower,
)
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.vision.checks import feature_difference, read_golden
from jaxrl.models.vision.files import load_tower
from sharding import TRAIN
from tests.marks import graded
from tests.models.files.test_adapter import ADAPTERS
from tests.models.vision.images import GOLDEN

NAMES = ("gemma4_limits", "qwen3_vl")
EACH = pytest.mark.parametrize("name", graded(NAMES, thorough=NAMES))


@EACH
def test_features_of_the_merged_tower_equal_those_of_peft(name, one_device):
    source, adapter = GOLDEN / name, ADAPTERS / f"{name}_tower"
    decoder, golden = model_config(source), read_golden(adapter)
    assert golden is not None
    tower = load_adapted_tower(adapter, source, decoder, rules=TRAIN, dtype=jnp.float32)
    assert tower is not None
    assert feature_difference(tower.cfg, tower, golden) < 1e-4
    cfg, base = load_tower(source, rules=TRAIN)
    assert tower.cfg == cfg
    assert feature_difference(cfg, base, golden) > 0.1


@EACH
def test_an_adapter_of_a_tower_is_written_as_peft_wrote_it(name, one_device, tmp_path):
    """The same tensors, and target modules that name the same layers of the base model."""
    source, adapter = GOLDEN / name, ADAPTERS / f"{name}_tower"
    decoder = with_adapted_tower(adapter, model_config(source), source)
    decoder = dataclasses.replace(decoder, lora=adapter_config(adapter, decoder))
    model = load_with_adapters(source, TRAIN, decoder, jnp.float32, seed=0, adapter=str(adapter))
    save_adapter(tmp_path / "again", model, base=str(source), source=source)
    before, after = (load_file(folder / WEIGHTS) for folder in (adapter, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    written = json.loads((tmp_path / "again" / CONFIG).read_text())
    layers = {name.removesuffix(".weight") for name in load_file(source / "model.safetensors")}
    chosen = {layer for layer in layers if re.fullmatch(written["target_modules"], layer)}
    assert chosen == {name.removeprefix(PREFIX).partition(".lora_")[0] for name in before}


def test_an_adapter_of_the_language_model_has_no_tower():
    source, adapter = GOLDEN.parents[1] / "golden" / "qwen3_vl", ADAPTERS / "qwen3_vl"
    decoder = model_config(source)
    assert load_adapted_tower(adapter, source, decoder, rules=TRAIN, dtype=jnp.float32) is None
