"""Gradients of towers inside of the decoder's program: parity with transformers, and layouts.

On the files of scripts/make_golden_tower_gradients.py.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import LoRAConfig
from jaxrl.data.images.mrope import mrope_positions
from jaxrl.data.packing import pack
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.learner.image_patches import TowerInputs
from jaxrl.learner.loss import loss_gradients, policy_objective
from jaxrl.learner.step import put_batch
from jaxrl.learner.xla import compiler_options
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.lora import combine, split, with_adapters
from jaxrl.models.packed import forward_routed
from jaxrl.models.spec import is_spec
from jaxrl.models.vision.files import load_whole
from jaxrl.models.vision.towers import known_tower, with_trained_tower
from jaxrl.types import Batch, ImageInput, PlacedImage, TrainingSample, Tree
from sharding import TRAIN, Rules, make_mesh
from sharding.rules import PIPELINE, RING, TENSOR, ULYSSES
from tests.learner.tiny_policy import QUICK_COMPILE, host_params, put_params, run_config
from tests.marks import graded
from tests.models.resized import resized

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


ADAPTERS = LoRAConfig(rank=2, alpha=0.5, target_modules=("q_proj", "embed_tokens", r"visual\..*"))


def staged(
    name: str,
    schedule: str,
    shape: tuple[int, int],
    lora: LoRAConfig,
    rules: Rules = TRAIN,
    **sizes: int,
):
    """(sum of the loss, gradients by path) of a policy with a tower, on a mesh.

    The decoder has four layers: the first of two stages has all those with deepstack features.
    """
    tower, cfg = known_tower(FOLDER / name), model_config(FOLDER / name)
    decoder = with_trained_tower(resized(cfg, L=4, stacked=True), tower, "none")
    decoder = with_adapters(lora, decoder)
    learner = dict(remat="full", pipeline_schedule=schedule)
    config = run_config(learner, old_logp="rollout")
    # Biases and factors of adapters are zero at the start.
    draw = np.random.default_rng(0).standard_normal
    host = jax.tree.map(
        lambda a: a + 0.1 * draw(a.shape).astype(a.dtype), host_params(decoder, 0, "float32")
    )

    @functools.partial(jax.jit, compiler_options=compiler_options(QUICK_COMPILE, "cpu"))
    def run(params: Decoder, batch: Batch):
        return loss_gradients(policy_objective, params, None, batch, cfg=config, rules=rules)

    with jax.set_mesh(make_mesh(None, **sizes)):
        params = put_params(host, decoder, rules)
        encoder = TowerInputs(
            ImageEncoder(FOLDER / name, tower, decoder, rules, np.dtype(np.float32))
        )
        loss, total = 0.0, None
        ranks = rules.n_shards("batch")
        for micro in pack(scored(name), shapes=(shape,), align=8, n_ranks=ranks):
            batch = put_batch(micro.batch, rules, encoder=encoder)
            grads, sums = jax.device_get(run(params, batch))
            loss, total = loss + sums.losses["loss/total"], add(total, grads)
        return loss, {jax.tree_util.keystr(p): g for p, g in jax.tree.leaves_with_path(total)}


def scored(name: str) -> list[TrainingSample]:
    """The samples with logprobs and advantages."""
    found = []
    for i, one in enumerate(samples(name) + samples(name)[:2]):
        n = len(one.tokens)
        logp, advantages = np.full(n, -3.0, np.float32), np.full(n, 1.0 - i / 3, np.float32)
        changes = dict(rollout_logp=logp, advantages=advantages, prompt_id=i)
        found.append(dataclasses.replace(one, **changes))
    return found


@functools.cache
def on_one_device(name: str, lora: LoRAConfig):
    return staged(name, "gpipe", (1, 240), lora)


NONE = LoRAConfig()
FSDP, DEVICES = dict(stage=2, fsdp=2), (PIPELINE, dict(stage=2))
ULYSSES_STAGES = (ULYSSES.with_stages(), dict(stage=2, sequence=2))


@pytest.mark.parametrize(
    ("name", "schedule", "lora", "shape", "rules", "sizes"),
    graded(
        [
            ("qwen3_vl", "gpipe", NONE, (2, 48), *DEVICES),
            ("qwen3_vl", "1f1b", NONE, (2, 48), *DEVICES),
            ("qwen3_vl", "gpipe", ADAPTERS, (1, 48), PIPELINE, FSDP),
            ("qwen3_vl", "1f1b", ADAPTERS, (1, 48), PIPELINE, FSDP),
            ("qwen3_vl", "1f1b", NONE, (2, 48), *ULYSSES_STAGES),
            ("qwen3_vl", "1f1b", NONE, (2, 48), TENSOR.with_stages(), dict(stage=2, tensor=2)),
            ("qwen3_vl", "1f1b", NONE, (2, 48), RING.with_stages(), dict(stage=2, sequence=2)),
            ("qwen2_5_vl", "1f1b", NONE, (2, 48), PIPELINE, FSDP),
            ("qwen2_5_vl", "gpipe", NONE, (2, 48), PIPELINE, FSDP),
        ],
        thorough=[
            ("qwen3_vl", "gpipe", NONE, (2, 48), *DEVICES),
            ("qwen3_vl", "1f1b", NONE, (2, 48), *DEVICES),
            ("qwen3_vl", "1f1b", ADAPTERS, (1, 48), PIPELINE, FSDP),
            ("qwen2_5_vl", "1f1b", NONE, (2, 48), PIPELINE, FSDP),
        ],
    ),
)
def test_pipelines_give_the_gradients_of_one_device(name, schedule, lora, shape, rules, sizes):
    """In several micro-batches: of the tower, the projector, the embedding and the layers."""
    want_loss, want = on_one_device(name, lora)
    loss, found = staged(name, schedule, shape, lora, rules, **sizes)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-5)
    assert found.keys() == want.keys()
    assert any("tower" in path for path in want)
    for path, g in found.items():
        bound = 2e-5 * np.abs(want[path]).max()
        np.testing.assert_allclose(g, want[path], rtol=2e-5, atol=bound, err_msg=path)
        assert np.abs(want[path]).max() > 0, path
