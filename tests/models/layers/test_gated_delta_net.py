"""Gated DeltaNet in a model: what is loaded, adapted, exported and refused.

Tests of jaxrl/models/layers/gated_delta_net.py and of the blocks of jaxrl/models/spec.py. The
logits are tested in tests/models/test_parity.py, meshes in tests/learner/test_sequence.py.
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.config.remat import parse_remat
from jaxrl.models.config import LoRA
from jaxrl.models.files.adapter import read_adapter, save_adapter
from jaxrl.models.files.hf_config import config_from_hf
from jaxrl.models.files.hf_load import load_model
from jaxrl.models.layer_runs import layer_runs
from jaxrl.models.lora import add_adapters, linear_layers, merge
from jaxrl.models.packed import forward_packed
from jaxrl.models.remat import check_whole_periods
from jaxrl.models.spec import ParamSpec
from sharding import TRAIN
from tests.learner.tiny_policy import HYBRID
from tests.models.test_parity import GOLDEN

FOLDER = GOLDEN / "qwen3_5"
GOLDEN_CONFIG = json.loads((FOLDER / "config.json").read_text())


def test_rows_of_a_head_that_are_apart_in_the_file_are_adjacent_here():
    """Two heads with one row of q, one of k and two of v: q0 q1 k0 k1 v0 v0 v1 v1 in the file."""
    spec = ParamSpec((2, 4, 3), (None,) * 3, "normal", "w", (8, 3), blocks=(1, 1, 2))
    file = np.arange(24.0).reshape(8, 3)
    here = spec.from_file(file)
    assert here[:, :, 0].tolist() == [[0, 6, 12, 15], [3, 9, 18, 21]]
    np.testing.assert_array_equal(spec.to_file(here), file)


def test_runs_of_layers_are_the_longest_periods():
    a, b, _ = HYBRID.layers
    c = dataclasses.replace(b, norms=(None, "norm_1", None, "norm_2"))
    assert layer_runs((a, a, a, b) * 3) == tuple([tuple(range(i, 12, 4) for i in range(4))])
    assert layer_runs((c, a, a, a)) == ((range(1),), (range(1, 4),))  # a prefix
    assert layer_runs((a, b, a, b, a)) == ((range(0, 4, 2), range(1, 4, 2)), (range(4, 5),))


def test_remat_of_parts_of_a_period_is_an_error():
    for spec in ("full?first=6", "full?group=2"):
        with pytest.raises(ValueError, match=r"the 4 layers .* multiples of 4"):
            for part in parse_remat(spec).ranges(8):
                check_whole_periods(part, 4)


@pytest.mark.parametrize(
    "stacked",
    [pytest.param(False, id="list"), pytest.param(True, id="stacked")],
)
@pytest.mark.thorough
def test_adapters_of_every_projection_are_saved_and_merged(stacked, one_device, tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    # The norms of states that are near zero would multiply rounding by a thousand.
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    cfg, base = load_model(folder, rules=TRAIN, stacked=stacked)
    names = {name.rpartition(".")[2] for name in linear_layers(cfg)}
    assert names >= {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj"}
    lora = LoRA(rank=2, alpha=4.0, targets=("in_proj_qkv", "in_proj_a", "out_proj", "q_proj"))
    model = add_adapters(base, lora, seed=0, rules=TRAIN, dtype=jnp.float32)

    def fill(path, leaf: jax.Array) -> jax.Array:
        if not jax.tree_util.keystr(path).endswith(".lora.b"):
            return leaf
        return 0.1 * jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)

    model = jax.tree_util.tree_map_with_path(fill, model)
    save_adapter(tmp_path / "adapter", model, base=str(folder))
    fresh = add_adapters(base, lora, seed=1, rules=TRAIN, dtype=jnp.float32)
    read = read_adapter(tmp_path / "adapter", fresh, TRAIN, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, read, model)

    tokens = jnp.asarray(np.load(FOLDER / "golden.npz")["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ones = jnp.ones_like(tokens)
    run = jax.jit(lambda m: forward_packed(m, tokens, ones, positions, rules=TRAIN))
    plain, adapted, merged = run(base), run(model), run(merge(model))
    np.testing.assert_allclose(merged, adapted, rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(adapted - plain)).max() > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layer_types=["linear_attention"] * 3), "has no full_attention"),
        (dict(layer_types=["linear_attention", "sliding_attention", "full_attention"]), "sliding"),
        (dict(hidden_act="gelu_new"), "hidden_act is 'gelu_new'"),
        (dict(linear_num_value_heads=3), "3 value heads are not a multiple of 2 key heads"),
        (dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.2)), "3.2 rotated"),
    ],
    ids=str,
)
def test_bad_configs_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(GOLDEN_CONFIG | change)


def fused_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with those of the experts of a layer in two, as transformers 5 computes them."""
    fused, apart = {}, {name: w for name, w in tensors.items() if ".experts." in name}
    for layer in sorted({name.partition(".experts.")[0] for name in apart}):
        gate, up, down = (
            np.stack([apart[f"{layer}.experts.{e}.{part}_proj.weight"] for e in range(4)])
            for part in ("gate", "up", "down")
        )
        fused[f"{layer}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        fused[f"{layer}.experts.down_proj"] = down
    return {name: w for name, w in tensors.items() if name not in apart} | fused


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_an_image_checkpoint_is_found(family, one_device, tmp_path):
    folder = GOLDEN / family
    golden_config = json.loads((folder / "config.json").read_text())
    tensors = fused_experts(load_file(folder / "model.safetensors"))
    named = {name.replace("model.", "model.language_model.", 1): w for name, w in tensors.items()}
    other = dict.fromkeys(("model.visual.pos_embed.weight", "mtp.norm.weight"), np.ones(2, "f4"))
    save_file(named | other, tmp_path / "model.safetensors")
    config = dict(model_type=family, text_config=golden_config, vision_config={})
    (tmp_path / "config.json").write_text(json.dumps(config))
    cfg, model = load_model(tmp_path, rules=TRAIN)
    want_cfg, want = load_model(folder, rules=TRAIN)
    assert cfg == want_cfg
    jax.tree.map(np.testing.assert_array_equal, model, want)
