"""FLOPs and activations of towers against XLA's count and the residuals of jax.vjp."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.spec import abstract_params
from jaxrl.models.vision.flops import tower_activation_bytes, tower_flops
from jaxrl.models.vision.patches import pack_patches
from jaxrl.models.vision.tower import tower_specs
from jaxrl.models.vision.towers import folder_tower
from sharding import TRAIN
from tests.marks import graded
from tests.models.vision.images import GOLDEN, TOWERS, Image

SIDE = 8  # patches: one block of keys, because XLA counts a loop once


def wide_tower(name: str, **changes):
    """The golden tower with products that are far larger than the operations between them."""
    cfg = folder_tower(GOLDEN / name)
    assert cfg is not None
    attn = dataclasses.replace(cfg.attn, N=4, H=32)
    sizes = dict(D=128, attn=attn, table=cfg.table and SIDE, window=0, **changes)
    return dataclasses.replace(cfg, ffn=dataclasses.replace(cfg.ffn, F=256), **sizes)


def traced(cfg, remat: str = "none"):
    """(tower without arrays, one image in a row, the tower's function)."""
    grid = (1, SIDE, SIDE)
    patches = np.zeros((SIDE**2, cfg.patch_features), np.float32)
    rows = jax.tree.map(jnp.asarray, pack_patches(cfg, [[Image(patches, grid)]], SIDE**2))

    def features(tower):
        out, deep = tower(rows, rules=TRAIN, remat=remat)
        return jnp.stack([out, *deep])

    return abstract_params(tower_specs(cfg), TRAIN, jnp.float32), features, grid


@pytest.mark.parametrize("name", graded(TOWERS, default=["qwen2_5_vl"]))
def test_flops_are_those_that_xla_counts(name, one_device):
    """XLA counts the element-wise operations too: a few per cent here."""
    cfg = wide_tower(name)
    tower, features, grid = traced(cfg)
    counted = jax.jit(features).lower(tower).cost_analysis()["flops"]
    expected = tower_flops(cfg, [grid])
    assert expected < counted < 1.15 * expected


def test_a_window_counts_its_own_pairs():
    """4 x 4 tokens in windows of 2 x 2: 4 windows of 16 patches in place of one of 64."""
    cfg = dataclasses.replace(wide_tower("qwen2_5_vl"), full_layers=(0,))
    windows = dataclasses.replace(cfg, window=2)
    saved = (cfg.L - 1) * 4 * cfg.D * (64**2 - 4 * 16**2)
    grids = [(1, SIDE, SIDE)]
    assert tower_flops(cfg, grids) - tower_flops(windows, grids) == saved


def test_images_add_up():
    cfg = wide_tower("qwen3_vl")
    a, b = [(1, 2, 4)], [(1, 6, 2)]
    assert tower_flops(cfg, a) + tower_flops(cfg, b) == tower_flops(cfg, a + b)


@pytest.mark.thorough
@pytest.mark.parametrize("name", TOWERS)
def test_activations_are_what_the_backward_pass_keeps(name, one_device):
    cfg = wide_tower(name)
    tower, features, _ = traced(cfg, "full")
    _, pull_back = jax.eval_shape(lambda tower: jax.vjp(features, tower), tower)
    rows = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.shape[:1] == (1,)]  # no weights
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in rows)
    assert 0.95 < kept / tower_activation_bytes(cfg, SIDE**2, 4) < 1.1
