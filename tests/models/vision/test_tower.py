"""Features of vision towers against those of transformers' torch towers."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.files.hf_save import named_tensors
from jaxrl.models.spec import abstract_params, init_params
from jaxrl.models.vision.files import load_tower
from jaxrl.models.vision.patches import pack_patches
from jaxrl.models.vision.tower import Tower, tower_specs
from jaxrl.models.vision.towers import folder_tower
from sharding import RING, TENSOR, TRAIN, ULYSSES, Rules, make_mesh
from tests.marks import graded
from tests.models.vision.images import GOLDEN, TOWERS, Image, golden_images

P = 216  # patches of a row: all images and padding


@functools.partial(jax.jit, static_argnames=("rules", "remat"))
def features(tower: Tower, rows, *, rules: Rules = TRAIN, remat: str = "none"):
    out, deep = tower(rows, rules=rules, remat=remat)
    return jnp.stack([out, *deep])


@pytest.fixture(scope="module", params=TOWERS)
def golden(request):
    with jax.set_mesh(make_mesh()):
        cfg, tower = load_tower(GOLDEN / request.param, rules=TRAIN)
    return cfg, tower, *golden_images(request.param)


@pytest.mark.parametrize("golden", graded(TOWERS, default=["qwen3_vl"]), indirect=True)
def test_features_equal_those_of_transformers(golden, one_device):
    """Several images of odd sizes in one row, of each the values of torch, for deepstack too."""
    cfg, tower, images, expected, deep = golden
    found = np.asarray(features(tower, pack_patches(cfg, [images], P)))
    n = sum(map(len, expected))
    np.testing.assert_allclose(found[0, 0, :n], np.concatenate(expected), atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(found[1:, 0, :n], np.concatenate(deep, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.thorough
def test_gradients_through_limits_equal_those_of_transformers(one_device):
    """Limits have no gradient; some of all inputs and outputs are outside of them."""
    saved = np.load(GOLDEN / "gemma4_limits" / "golden_tower.npz")
    cfg, tower = load_tower(GOLDEN / "gemma4_limits", rules=TRAIN)
    images, expected, _ = golden_images("gemma4_limits")
    rows, n = pack_patches(cfg, [images], P), sum(map(len, expected))
    of_images = np.arange(P // cfg.merge**2)[:, None] < n

    @jax.jit
    @jax.grad
    def gradient(tower: Tower):
        return jnp.sum(jnp.sin(features(tower, rows)) * of_images)

    grads = {t.name: t.read() for t in named_tensors(tower_specs(cfg), gradient(tower))}
    limits = {name for name in grads if name.endswith(("put_min", "put_max"))}
    assert len(limits) == 4 * 7 * cfg.L
    assert all(grads[name] == 0 for name in limits)
    names = {name.removeprefix("grad:") for name in saved if name.startswith("grad:")}
    assert grads.keys() - limits == names
    for name in names:
        found, torch = grads[name], saved[f"grad:{name}"]
        np.testing.assert_allclose(found, torch, atol=1e-4 * max(1, np.abs(torch).max()))
    unlimited = jax.tree.map_with_path(
        lambda path, w: jnp.sign(w) * jnp.inf if "limits" in jax.tree_util.keystr(path) else w,
        tower,
    )
    found = np.asarray(features(unlimited, rows))[0, 0, :n]
    assert np.abs(found - np.concatenate(expected)).max() > 0.1


@pytest.mark.thorough
def test_packed_images_give_the_features_of_single_images(golden, one_device):
    """Also in another order and in several rows: values and gradients."""
    cfg, tower, images, *_ = golden
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(2, len(i.patches) // cfg.merge**2, cfg.out_D)) for i in images]

    def loss(tower: Tower, rows, weight):
        out, deep = tower(rows, rules=TRAIN)
        values = jnp.stack([out, *deep])
        # every deepstack output counts, with another weight
        return jnp.sum(jnp.stack([values[0], values[1:].sum(0)]) * weight), values

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def run(batch: list[list[int]], n_patches: int):
        rows = pack_patches(cfg, [[images[i] for i in row] for row in batch], n_patches)
        weight = np.zeros((2, len(batch), n_patches // cfg.merge**2, cfg.out_D), np.float32)
        places: dict[int, tuple[int, slice]] = {}
        for b, row in enumerate(batch):
            start = 0
            for i in row:
                end = start + weights[i].shape[1]
                places[i] = b, slice(start, end)
                weight[:, b, start:end], start = weights[i], end
        (_, values), grads = step(tower, rows, weight)
        return {i: np.asarray(values[:, b, where]) for i, (b, where) in places.items()}, grads

    batch = [[2, 0], [1, *range(3, len(images))]]
    packed, gradient = run(batch, P)
    single = [run([[i], []], P) for i in range(len(images))]
    for i, (values, _) in enumerate(single):
        np.testing.assert_allclose(packed[i], values[i], atol=1e-5, rtol=1e-5)
    total = jax.tree.map(lambda *parts: sum(parts), *(grads for _, grads in single))
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()), rtol=1e-5)


@pytest.mark.parametrize("golden", graded(TOWERS, default=["qwen3_vl"]), indirect=True)
def test_values_of_padding_have_no_effect(golden, one_device):
    cfg, tower, images, expected, _ = golden
    n, n_tokens = sum(len(i.patches) for i in images), sum(map(len, expected))
    rows = pack_patches(cfg, [images], P)
    noisy = np.where(np.arange(P)[:, None] < n, rows.patches, 1e3).astype(np.float32)
    found, plain = features(tower, rows.replace(patches=noisy)), features(tower, rows)
    np.testing.assert_array_equal(found[:, :, :n_tokens], plain[:, :, :n_tokens])


@pytest.mark.thorough
def test_the_length_of_a_row_has_no_effect(golden, one_device):
    cfg, tower, images, expected, _ = golden
    n_tokens = sum(map(len, expected))
    short, long = (features(tower, pack_patches(cfg, [images], n)) for n in (P, 2 * P))
    np.testing.assert_allclose(long[:, :, :n_tokens], short[:, :, :n_tokens], atol=1e-5)


@pytest.mark.parametrize("golden", ["qwen3_vl"], indirect=True)
def test_patches_of_one_image_do_not_see_another(golden, one_device):
    cfg, tower, images, expected, _ = golden
    other = [images[0], Image(2 * images[1].patches, images[1].grid), *images[2:]]
    n, end = len(expected[0]), len(expected[0]) + len(expected[1])
    a, b = (features(tower, pack_patches(cfg, [these], P)) for these in (images, other))
    np.testing.assert_array_equal(a[:, :, :n], b[:, :, :n])
    np.testing.assert_array_equal(a[:, :, end:], b[:, :, end:])
    assert np.abs(a[:, :, n:end] - b[:, :, n:end]).max() > 0.1


MESHES = {
    "data": (TRAIN, dict(fsdp=2)),
    "tensor": (TENSOR, dict(fsdp=2, tensor=2)),
    "ulysses": (ULYSSES, dict(fsdp=2, sequence=2)),
    "ring": (RING, dict(fsdp=2, sequence=2)),
}


EVERY = list(itertools.product(MESHES, TOWERS))
WINDOWS = [(mesh, "qwen2_5_vl") for mesh in MESHES]


@pytest.mark.parametrize(("mesh", "name"), graded(EVERY, default=WINDOWS))
def test_every_mesh_traces_the_tower(mesh, name):
    """With explicit shardings, without a compilation."""
    rules, sizes = MESHES[mesh]
    cfg = folder_tower(GOLDEN / name)
    assert cfg is not None
    images, *_ = golden_images(name)
    rows = pack_patches(cfg, [images[:2], images[2:]], P)
    with jax.set_mesh(make_mesh(**sizes)):
        tower = abstract_params(tower_specs(cfg), rules, jnp.float32)
        out, deep = jax.eval_shape(lambda t, r: t(r, rules=rules), tower, rows)
    assert out.shape == (2, P // cfg.merge**2, cfg.out_D)
    assert len(deep) == len(cfg.deepstack)


@pytest.mark.parametrize(
    ("mesh", "name"), graded(EVERY, thorough=[*WINDOWS, ("tensor", "gemma4"), ("ring", "qwen3_vl")])
)
def test_every_mesh_gives_the_same_features_and_gradients(mesh, name):
    rules, sizes = MESHES[mesh]
    images, *_ = golden_images(name)
    batch = [images[:2], images[2:]]

    def run(rules: Rules, **sizes: int):
        with jax.set_mesh(make_mesh(**sizes)):
            cfg, tower = load_tower(GOLDEN / name, rules=rules)
            rows = pack_patches(cfg, batch, P)
            rows = jax.tree.map(
                lambda a: jax.device_put(a, jax.NamedSharding(jax.sharding.get_mesh(), spec(a))),
                rows,
            )

            def loss(tower, rows):
                out, deep = tower(rows, rules=rules)
                values = jnp.stack([out, *deep])
                return jnp.sum(jnp.sin(values) * (rows.segments[:, :1] > 0)[..., None]), values

            (_, values), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(tower, rows)
            return jax.tree.map(np.asarray, (values, grads))

    def spec(a) -> jax.P:
        return rules.spec("batch", None) if a.ndim > 1 else jax.P()

    (expected, gradient), (found, sharded) = run(TRAIN), run(rules, **sizes)
    n = [sum(len(i.patches) for i in row) for row in batch]
    cfg = folder_tower(GOLDEN / name)
    assert cfg is not None
    for b in range(2):
        tokens = n[b] // cfg.merge**2
        np.testing.assert_allclose(
            found[:, b, :tokens], expected[:, b, :tokens], atol=1e-5, rtol=1e-5
        )
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("golden", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize("remat", ["full", "attention", "dots"])
def test_remat_changes_no_gradient(golden, remat, one_device):
    cfg, tower, images, *_ = golden
    rows = pack_patches(cfg, [images], P)

    def gradient(remat: str):
        return jax.jit(jax.grad(lambda t: jnp.sum(features(t, rows, remat=remat) ** 2)))(tower)

    for a, b in zip(*(jax.tree.leaves(gradient(r)) for r in (remat, "none")), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()), rtol=1e-5)


@pytest.mark.thorough
def test_a_new_tower_is_the_same_on_every_mesh():
    cfg = folder_tower(GOLDEN / "qwen3_5")
    assert cfg is not None
    specs = tower_specs(dataclasses.replace(cfg, L=1))

    def init(rules: Rules, **sizes: int):
        with jax.set_mesh(make_mesh(**sizes)):
            tower = init_params(jax.random.key(3), specs, rules, jnp.float32)
            return jax.tree.map(np.asarray, tower)

    many = init(TENSOR, fsdp=2, tensor=2)
    jax.tree.map(np.testing.assert_array_equal, init(TRAIN), many)
