"""Several adapters on one base model, of different ranks, scales and layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models.config import LoRA
from jaxrl.models.files.adapter import adapter_config
from jaxrl.models.files.adapter_stack import put_adapter, stack_adapters
from jaxrl.models.files.hf_load import load_params, model_config
from jaxrl.models.lora import add_adapters
from sharding.rules import DECODE
from tests.models.files.test_adapter import ADAPTERS, changed_config
from tests.models.test_parity import GOLDEN

LLAMA = ADAPTERS / "llama"  # rank 4, alpha 6


def smaller(folder):
    """An adapter of rank 1 and scale 3 with the first row of A and column of B of PEFT's."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text((LLAMA / "adapter_config.json").read_text())
    targets = ["q_proj"]
    changed_config(r=1, lora_alpha=3.0, target_modules=targets)(folder)
    tensors = load_file(LLAMA / "adapter_model.safetensors")
    kept = {
        name: np.ascontiguousarray(values[:1] if "lora_A" in name else values[:, :1])
        for name, values in tensors.items()
        if ".q_proj." in name
    }
    save_file(kept, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("stacked", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_ranks_and_layers_are_padded_with_zeros(stacked, one_device, tmp_path):
    cfg = dataclasses.replace(model_config(GOLDEN / "llama"), stacked=stacked)
    base = load_params(GOLDEN / "llama", DECODE, cfg, jnp.float32)
    folders = [smaller(tmp_path / "small"), LLAMA]
    model = stack_adapters(base, folders, rules=DECODE, dtype=jnp.float32)
    lora = model.cfg.lora
    assert lora is not None and (lora.rank, lora.scale, lora.n_stacked) == (4, 1.0, 2)
    assert model.embed is base.embed
    written = load_file(LLAMA / "adapter_model.safetensors")
    layers = model.layers if stacked else model.layers[1]
    for layer, module in ((layers.attn.q, "self_attn.q_proj"), (layers.mlp.up, "mlp.up_proj")):
        a, b = (x[1] if stacked else x for x in (layer.lora.a, layer.lora.b))
        name = f"base_model.model.model.layers.1.{module}.lora_%s.weight"
        want_a, want_b = written[name % "A"], written[name % "B"]
        a, b = np.reshape(a, (8, -1)), np.reshape(b, (-1, 8))
        np.testing.assert_array_equal(a[4:], want_a)
        np.testing.assert_array_equal(b[:, 4:], np.float32(1.5) * want_b)
        assert not np.any(a[1:4]) and not np.any(b[:, 1:4])
        first = module.endswith("q_proj")  # the first adapter has no other layer
        np.testing.assert_array_equal(a[0], first * want_a[0])
        np.testing.assert_array_equal(b[:, 0], first * np.float32(3) * want_b[:, 0])


def test_an_adapter_of_another_base_is_refused(one_device):
    base = load_params(GOLDEN / "qwen3", DECODE, model_config(GOLDEN / "qwen3"), jnp.float32)
    with pytest.raises(ValueError, match=r"golden_adapters/llama is of another model"):
        stack_adapters(base, [ADAPTERS / "qwen3", LLAMA], rules=DECODE, dtype=jnp.float32)
    assert adapter_config(LLAMA).scale == 1.5


@pytest.mark.thorough
@pytest.mark.parametrize("stacked", [False, True])
def test_adapters_that_are_put_in_later_are_those_of_a_stack(stacked, one_device, tmp_path):
    cfg = dataclasses.replace(model_config(GOLDEN / "llama"), stacked=stacked)
    base = load_params(GOLDEN / "llama", DECODE, cfg, jnp.float32)
    folders = [smaller(tmp_path / "small"), LLAMA]
    wanted = stack_adapters(base, folders, rules=DECODE, dtype=jnp.float32)
    assert wanted.cfg.lora is not None
    how = dict(rules=DECODE, dtype=jnp.float32)
    model = add_adapters(base, wanted.cfg.lora, seed=0, **how)
    for i in (2, 1, 2):  # the second place is overwritten
        model = put_adapter(model, i, folders[i - 1], **how)
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    assert model.embed is base.embed


def test_an_adapter_without_room_is_refused(one_device):
    base = load_params(GOLDEN / "llama", DECODE, model_config(GOLDEN / "llama"), jnp.float32)
    how = dict(rules=DECODE, dtype=jnp.float32)
    for rank, targets in ((2, ("q_proj", "up_proj")), (8, ("q_proj",))):
        room = LoRA(rank, float(rank), targets=targets, n_stacked=1)
        model = add_adapters(base, room, seed=0, **how)
        with pytest.raises(
            ValueError, match=f"has room for the rank {rank} and {', '.join(targets)}"
        ):
            put_adapter(model, 1, LLAMA, **how)
