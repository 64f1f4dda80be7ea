"""PiSSA: adapters that start at the principal part of their weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.config.keys import LoRAConfig
from jaxrl.models.adapter_init import principal
from jaxrl.models.decoder import init_model
from jaxrl.models.files.adapter import adapter_config, save_adapter
from jaxrl.models.files.hf_save import param_tensors
from jaxrl.models.lora import (
    adapters,
    add_adapters,
    checkpoint_part,
    combine,
    merge,
    split,
    with_base,
    without_adapters,
)
from sharding import make_mesh
from sharding.rules import TRAIN
from tests.models.test_adapter_stack import hidden
from tests.models.test_lora import TINY

TARGETS = ("q_proj", "up_proj")
TOKENS = jnp.arange(16)[None]


def pissa(*, stacked=False, **changes):
    """A model of two layers whose adapters of rank 2 start at the principal part."""
    base = init_model(dataclasses.replace(TINY, stacked=stacked), seed=0, rules=TRAIN)
    cfg = dict(rank=2, alpha=3.0, init="pissa", target_modules=TARGETS) | changes
    lora = adapters(LoRAConfig(**cfg), TINY)
    return base, add_adapters(base, lora, seed=1, rules=TRAIN, dtype=jnp.float32)


def trained(model):
    """The model after a large change of what training changes."""
    chosen, frozen = split(model)

    def change(leaf):
        step = 0.3 * jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)
        return leaf + jax.device_put(step, leaf.sharding)

    return combine(jax.tree.map(change, chosen), frozen)


def test_the_principal_part_is_the_best_approximation_of_its_rank():
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(60, 60)))
    v, _ = np.linalg.qr(rng.normal(size=(90, 90)))
    s = 0.8 ** np.arange(60)  # neither side is as small as rank + 8: the iteration must converge
    w = (u * s) @ v[:60]
    a, b = principal(jnp.asarray(w, jnp.float32), 4)
    np.testing.assert_allclose(b @ a, (u[:, :4] * s[:4]) @ v[:4], atol=1e-5)
    np.testing.assert_allclose(b.T @ b, np.diag(s[:4]), atol=1e-5)  # sqrt(S) in both factors
    np.testing.assert_allclose(a @ a.T, np.diag(s[:4]), atol=1e-5)


@pytest.mark.parametrize(
    "stacked",
    [pytest.param(False, marks=pytest.mark.thorough), pytest.param(True, marks=pytest.mark.slow)],
)
def test_the_model_starts_as_its_base_and_the_base_stays(stacked, one_device):
    base, model = pissa(stacked=stacked)
    np.testing.assert_array_equal(hidden(model, TOKENS), hidden(base, TOKENS))
    again = without_adapters(model)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (again, base)), strict=True))
    q = model.layers.attn.q if stacked else model.layers[1].attn.q
    w, a, b = (np.asarray(x[1] if stacked else x) for x in (q.w, q.lora.a, q.lora.b))
    u, s, vt = np.linalg.svd(w.reshape(-1, 16))  # alpha / rank = 3/2
    best = (u[:, :2] * s[:2]) @ vt[:2]
    np.testing.assert_allclose(1.5 * b.reshape(-1, 2) @ a, best, atol=1e-6)
    assert q.lora.a is not q.lora.a0 and len(jax.tree.leaves(split(model)[0])) == (
        (1 if stacked else 2) * len(TARGETS) * 2  # A and B, not their starts
    )


@pytest.mark.thorough
def test_what_a_checkpoint_keeps_and_the_base_are_the_model(one_device):
    base, model = pissa()
    kept = checkpoint_part(trained(model))
    assert len(jax.tree.leaves(kept)) == 2 * len(TARGETS) * 4
    np.testing.assert_array_equal(
        hidden(with_base(kept, base), TOKENS), hidden(trained(model), TOKENS)
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(dict(rslora=True), marks=pytest.mark.slow),
        pytest.param(dict(dora=True), marks=pytest.mark.slow),
    ],
)
def test_merged_and_saved_adapters_are_the_change_of_the_base(changes, one_device, tmp_path):
    base, model = pissa(**changes)
    model = trained(model)
    np.testing.assert_allclose(hidden(merge(model), TOKENS), hidden(model, TOKENS), atol=2e-5)
    exported = {tensor.name: tensor.read() for tensor in param_tensors(model, None)}
    for tensor in param_tensors(merge(model), None):
        np.testing.assert_allclose(exported[tensor.name], tensor.read(), atol=1e-6)
    save_adapter(tmp_path / "adapter", model, base="base")
    found = adapter_config(tmp_path / "adapter")
    assert found.rank == 4 and found.scale == pytest.approx(model.cfg.lora.scale)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj."
    a, b = (tensors[f"base_model.model.{name}lora_{part}.weight"] for part in "AB")
    weight = base.layers[1].mlp.up.w + found.scale * b @ a
    if found.dora:
        m = tensors[f"base_model.model.{name}lora_magnitude_vector"]
        weight = m[:, None] * weight / np.linalg.norm(weight, axis=1, keepdims=True)
    np.testing.assert_allclose(exported[f"{name}weight"], weight, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(fsdp=2, tensor=2), dict(stage=2, tensor=2)], ids=str)
def test_a_mesh_changes_no_start(sizes):
    with jax.set_mesh(make_mesh()):
        want = jax.device_get(pissa(stacked=True)[1])
    with jax.set_mesh(make_mesh(**sizes)):
        found = jax.device_get(pissa(stacked=True)[1])
    for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
