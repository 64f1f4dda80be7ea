"""Gradients of towers inside of the decoder's program: parity with transformers, and layouts.

On the files of scripts/make_golden_tower_gradients.py.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.data.images.mrope import mrope_positions
from jaxrl.data.packing import pack
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.learner.image_patches import TowerInputs
from jaxrl.learner.step import put_batch
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.lora import combine, split
from jaxrl.models.packed import forward_routed
from jaxrl.models.spec import is_spec
from jaxrl.models.vision.files import load_whole
from jaxrl.models.vision.towers import known_tower, with_trained_tower
from jaxrl.types import Batch, ImageInput, PlacedImage, TrainingSample, Tree
from sharding import TRAIN, Rules, make_mesh
from sharding.rules import RING, TENSOR

FOLDER = Path(__file__).parent / "golden_gradients"
FAMILIES = sorted(path.name for path in FOLDER.iterdir())
IMAGE, MERGE = 5, 2


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / name / "gradients.npz"))


def samples(name: str) -> list[TrainingSample]:
    """The two samples of a golden file, and one of the first with no token in the loss."""
    return [sample(name, 0), sample(name, 1), sample(name, 0, in_loss=False)]


def sample(name: str, i: int, *, in_loss: bool = True) -> TrainingSample:
    saved = golden(name)
    tokens, mask, patches = (saved[f"{part}{i}"] for part in ("tokens", "mask", "patches"))
    grids = [tuple(map(int, grid)) for grid in saved[f"grids{i}"]]
    axes, _ = mrope_positions(tokens, grids, image_token=IMAGE, merge=MERGE)
    images, start, place = [], 0, 0
    for j, grid in enumerate(grids):
        n_patches = int(np.prod(grid))
        n, own = n_patches // MERGE**2, patches[start : start + n_patches]
        place += int(np.argmax(tokens[place:] == IMAGE))
        image = ImageInput(grid, n, f"{i}.{j}", load=lambda own=own: own)
        images.append(PlacedImage(place, image))
        start, place = start + n_patches, place + n
    n_response = int(mask.sum())
    return TrainingSample(
        prompt_tokens=tokens[:-n_response],
        tokens=tokens[-n_response:],
        loss_mask=np.full(n_response, in_loss),
        images=tuple(images),
        axis_positions=axes,
    )


@functools.partial(jax.jit, static_argnames=("rules", "remat"))
def gradients(model: Decoder, batch: Batch, rules: Rules, remat: str) -> tuple[jax.Array, Tree]:
    """(summed negative logprob of the targets in the loss, its gradient)"""
    trained, frozen = split(model)

    def loss(trained: Tree) -> jax.Array:
        model = combine(trained, frozen)
        hidden, _ = forward_routed(
            model,
            batch.tokens,
            batch.segments,
            batch.positions,
            features=batch.images,
            axis_positions=batch.axis_positions,
            rules=rules,
            remat=remat,
        )
        logp = jax.nn.log_softmax(model.logits(hidden, rules))
        chosen = jax.nn.one_hot(batch.targets, logp.shape[-1], dtype=bool)
        return -jnp.sum(jnp.sum(logp, axis=-1, where=chosen) * batch.mask)

    return jax.value_and_grad(loss)(trained)


def found(
    name: str,
    shape: tuple[int, int] = (1, 96),
    freeze: str = "none",
    remat: str = "none",
    rules: Rules = TRAIN,
    **sizes: int,
):
    """(loss, {name in files: gradient}) of micro-batches of so many rows and tokens of a rank."""
    with jax.set_mesh(make_mesh(**sizes)):
        tower, cfg = known_tower(FOLDER / name), model_config(FOLDER / name)
        decoder = with_trained_tower(cfg, tower, freeze)
        model = load_whole(FOLDER / name, rules, decoder, jnp.float32)
        encoder = TowerInputs(
            ImageEncoder(FOLDER / name, tower, decoder, rules, np.dtype(np.float32))
        )
        n_ranks = rules.n_shards("batch")
        loss, total = 0.0, None
        for micro in pack(samples(name), shapes=(shape,), align=8, n_ranks=n_ranks):
            batch = put_batch(micro.batch, rules, encoder=encoder)
            value, grads = jax.device_get(gradients(model, batch, rules, remat))
            loss, total = loss + value, add(total, grads)
        specs = jax.tree.leaves(split(decoder_specs(decoder))[0], is_leaf=is_spec)
        leaves = zip(specs, jax.tree.leaves(total), strict=True)
        return loss, {spec.hf: spec.to_file(grad) for spec, grad in leaves}


def add(total: Tree | None, grads: Tree) -> Tree:
    return grads if total is None else jax.tree.map(np.add, total, grads)


def of_tower(grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: grad for name, grad in grads.items() if "visual." in name}


def check_golden(name: str, loss: float, grads: dict[str, np.ndarray], expected: set[str]) -> None:
    """The gradients of the tower are those of transformers, and there are no others."""
    saved = golden(name)
    np.testing.assert_allclose(loss, saved["loss"], rtol=1e-5)
    short = {name.removeprefix("model."): grad for name, grad in of_tower(grads).items()}
    assert short.keys() == expected
    for part, grad in short.items():
        want = saved[f"grad:model.{part}"]
        np.testing.assert_allclose(
            grad, want, atol=1e-4 * max(np.abs(want).max(), 1), rtol=1e-4, err_msg=part
        )


def parts(name: str) -> set[str]:
    return {n.removeprefix("grad:model.") for n in golden(name) if n.startswith("grad:")}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_packed_images_are_those_of_transformers(name, one_device):
    """The images of three samples in one row, one of which two samples show."""
    loss, grads = found(name)
    check_golden(name, loss, grads, parts(name))


@pytest.mark.thorough
def test_a_frozen_tower_leaves_the_gradient_of_the_projector(one_device):
    loss, grads = found("qwen3_vl", freeze="tower")
    check_golden("qwen3_vl", loss, grads, {n for n in parts("qwen3_vl") if "merger" in n})


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (dict(shape=(1, 40)), {}),
        (dict(shape=(3, 40)), {}),
        (dict(remat="full"), {}),
        (dict(shape=(1, 48)), dict(fsdp=2)),
        (dict(shape=(1, 48), rules=TENSOR), dict(fsdp=2, tensor=2)),
        (dict(shape=(2, 48), rules=RING), dict(sequence=2)),
    ],
    ids=str,
)
def test_rows_remat_and_meshes_change_no_gradient(name, options, sizes):
    if name == "qwen2_5_vl" and "tensor" in sizes:
        pytest.skip("its decoder has one head")
    loss, grads = found(name, **options, **sizes)
    check_golden(name, loss, grads, parts(name))
