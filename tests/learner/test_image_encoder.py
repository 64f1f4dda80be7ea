"""Tests of jaxrl/learner/image_encoder.py: features that are computed once, and at their tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.data.image_places import TEXT, PackedImages
from jaxrl.data.packing import empty_batch
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.learner.step import put_batch
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.vision.towers import folder_tower
from jaxrl.types import ImageInput
from sharding import RING, TRAIN, make_mesh, row_order
from tests.models.vision.images import GOLDEN, golden_images

FAMILY = "qwen3_vl"
TEXT_FOLDER = GOLDEN.parents[1] / "golden" / FAMILY  # a language model with positions by axis


def inputs() -> list[ImageInput]:
    images, expected, _ = golden_images(FAMILY)
    return [
        ImageInput(image.grid, len(rows), str(i), load=functools.partial(np.asarray, image.patches))
        for i, (image, rows) in enumerate(zip(images, expected, strict=True))
    ]


def encoder(rules=TRAIN, **options) -> ImageEncoder:
    cfg = folder_tower(GOLDEN / FAMILY)
    assert cfg is not None
    decoder = model_config(TEXT_FOLDER)
    found = ImageEncoder(GOLDEN / FAMILY, cfg, decoder, rules, np.dtype(np.float32), **options)
    found.load()
    return found


def test_features_of_several_images_are_those_of_transformers(one_device):
    _, expected, deep = golden_images(FAMILY)
    for found, rows, layers in zip(encoder().encode(inputs()), expected, deep, strict=True):
        np.testing.assert_allclose(found.rows, rows, atol=1e-4, rtol=1e-4)
        assert found.deep is not None
        np.testing.assert_allclose(found.deep, np.moveaxis(layers, 0, 1), atol=1e-4, rtol=1e-4)


def test_the_tower_runs_once_for_an_image(one_device):
    one, calls = encoder(), []
    run = one._run
    one._run = lambda rows, n: calls.append(sum(map(len, rows))) or run(rows, n)
    first, second, *_ = inputs()
    one.encode([first])
    one.encode([second, first, first])
    one.encode([first, second])
    assert calls == [1, 1]


def test_the_oldest_features_are_forgotten(one_device):
    first, second, *_ = inputs()
    size = encoder().encode([first])[0].n_bytes
    one = encoder(kept_bytes=size)
    one.encode([first])
    one.encode([second])
    assert "0" not in one._kept
    assert len(one.encode([first, second])) == 2  # those of one call are not


def batch_of(image: ImageInput):
    """Two rows of 64 tokens; the second one has the image from token 30 on."""
    batch = empty_batch(2, 64)
    index = np.full((2, 64), TEXT, np.int32)
    index[1, 30 : 30 + image.n_tokens] = np.arange(image.n_tokens)
    return dataclasses.replace(batch, images=PackedImages(index, (image,)))


@pytest.mark.parametrize(
    ("sizes", "rules"),
    [
        ({}, TRAIN),
        pytest.param(dict(fsdp=2), TRAIN, marks=pytest.mark.thorough),
        pytest.param(dict(fsdp=2, sequence=2), RING, marks=pytest.mark.thorough),
    ],
)
def test_features_are_at_their_tokens(sizes, rules):
    image = min(inputs(), key=lambda image: image.n_tokens)
    with jax.set_mesh(make_mesh(**sizes)):
        one = encoder(rules)
        batch = put_batch(batch_of(image), rules, encoder=one)
        [encoded] = one.encode([image])
        rows = row_order(np.asarray(batch.images.rows), rules)
        is_image = row_order(np.asarray(batch.images.is_image), rules)
        deep = row_order(np.asarray(batch.images.deep), rules)
        axes = row_order(np.asarray(batch.axis_positions), rules)
        [shapes] = one.abstract(2, 64, rules)
    _, expected, _ = golden_images(FAMILY)
    np.testing.assert_allclose(encoded.rows, expected[int(image.digest)], atol=1e-4, rtol=1e-4)
    at = slice(30, 30 + image.n_tokens)
    np.testing.assert_array_equal(rows[1, at], encoded.rows)
    np.testing.assert_array_equal(deep[1, at], encoded.deep)
    assert is_image.sum() == image.n_tokens and is_image[1, at].all()
    assert not rows[0].any() and not rows[1, : at.start].any()
    assert axes.shape == (2, 64, 3)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), shapes, batch.images)
    assert all(jax.tree.leaves(same))


def test_images_without_a_tower_are_refused(one_device):
    with pytest.raises(ValueError, match="has no vision tower"):
        put_batch(batch_of(inputs()[0]), TRAIN)


def test_another_number_of_tokens_is_refused(one_device):
    image = dataclasses.replace(inputs()[0], n_tokens=inputs()[0].n_tokens + 1)
    with pytest.raises(ValueError, match="tokens in the prompt and"):
        encoder().encode([image])
