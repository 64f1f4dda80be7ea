"""Features of images in packed rows: parity with transformers, layouts, meshes, gradients.

Tests of jaxrl/models/image_features.py, jaxrl/models/layer_loop.py and the M-RoPE of
jaxrl/models/layers/rope.py, on the files of scripts/make_golden_images.py.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.files.hf_load import load_model
from jaxrl.models.image_features import ImageFeatures
from jaxrl.models.packed import forward_packed
from sharding import TRAIN, make_mesh
from sharding.rules import PIPELINE, TENSOR, ULYSSES
from tests.marks import graded

FOLDER = Path(__file__).parent
FAMILIES = sorted(path.stem for path in (FOLDER / "golden_images").glob("*.npz"))


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "golden_images" / f"{name}.npz"))


def inputs(name: str) -> tuple:
    """(tokens, segments, positions, features, axis_positions) of the two rows of a golden file."""
    saved = golden(name)
    tokens = saved["tokens"]
    image = tokens == 60
    index = np.where(image, np.cumsum(image).reshape(tokens.shape) - 1, -1).astype(np.int32)
    deep = saved["deep"] if len(saved["deep"]) else None
    axes = None if name == "gemma3" else np.moveaxis(saved["positions"], 0, 2)
    places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return tokens, np.ones_like(tokens), places, ImageFeatures(saved["rows"], index, deep), axes


@functools.partial(jax.jit, static_argnames="rules")
def logits(model, tokens, segments, positions, features, axes, rules=TRAIN):
    hidden = forward_packed(
        model, tokens, segments, positions, features=features, axis_positions=axes, rules=rules
    )
    return model.logits(hidden, rules)


@pytest.mark.parametrize(
    ("name", "stacked"),
    graded(
        [(name, stacked) for name in FAMILIES for stacked in (False, True)],
        default=[("qwen3_vl", True), ("qwen2_5_vl", False), ("gemma3", True)],
    ),
)
def test_logits_equal_those_of_transformers(name, stacked, one_device):
    _, model = load_model(FOLDER / "golden" / name, rules=TRAIN, stacked=stacked)
    found = logits(model, *inputs(name))
    np.testing.assert_allclose(
        found[..., ::8], golden(name)["logits"], atol=1e-4, rtol=1e-4
    )


def loss(model, batch, rules):
    """(Σ weight logits, gradients of the model and of the features' rows and deep sums)."""
    tokens, segments, positions, features, axes = batch

    def total(model, rows, deep):
        given = dataclasses.replace(features, rows=rows, deep=deep)
        out = logits(model, tokens, segments, positions, given, axes, rules=rules)
        weights = jnp.cos(jnp.arange(out.shape[-1]))
        return jnp.sum(out * weights * (segments > 0)[..., None])

    return jax.value_and_grad(total, argnums=(0, 1, 2))(model, features.rows, features.deep)


def on_mesh(name: str, sizes: dict, *, rules=TRAIN, stacked=False, batch=None):
    """`loss` on a mesh, on the host; rows have two more copies, for the meshes' ranks."""
    batch = batch or inputs(name)
    with jax.set_mesh(make_mesh(**sizes)):
        _, model = load_model(FOLDER / "golden" / name, rules=rules, stacked=stacked)
        place = functools.partial(jax.tree.map, lambda a: jax.device_put(a, jax.P()))
        return jax.device_get(jax.jit(loss, static_argnames="rules")(model, place(batch), rules))


def assert_same(found, want, tolerance=1e-5):
    np.testing.assert_allclose(found[0], want[0], rtol=tolerance)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize(
    ("name", "sizes", "rules"),
    graded(
        [
            ("qwen3_vl", dict(fsdp=2, tensor=2), TENSOR),
            ("qwen3_vl", dict(fsdp=2, sequence=2), ULYSSES),
            ("gemma3", dict(fsdp=2, sequence=2), ULYSSES),
            ("qwen3_5", dict(fsdp=2, tensor=2), TENSOR),
        ],
        default=[("qwen3_vl", dict(fsdp=2, tensor=2), TENSOR)],
    ),
)
def test_a_mesh_gives_the_numbers_of_one_device(name, sizes, rules):
    """With sequence parallelism images begin on one device and end on another."""
    stacked = name == "gemma3"
    want = on_mesh(name, {}, stacked=stacked)
    assert_same(on_mesh(name, sizes, rules=rules, stacked=stacked), want)
