"""Tests of jaxrl/learner/image_patches.py: the patches of each rank, and their places."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.data.image_places import TEXT, PackedImages
from jaxrl.data.packing import empty_batch
from jaxrl.learner.image_patches import TowerInputs, images_by_rank
from sharding import RING, TRAIN, make_mesh, row_order
from tests.learner.test_image_encoder import encoder, inputs


def packed() -> PackedImages:
    """Four rows: the image 0, the images 1 and 2, the image 1 again, text."""
    images = sorted(inputs(), key=lambda image: image.n_tokens)[:3]
    n = [image.n_tokens for image in images]
    rows = np.split(np.arange(sum(n)), np.cumsum(n)[:-1])
    index = np.full((4, 64), TEXT, np.int32)
    index[0, 5 : 5 + n[0]] = rows[0]
    index[1, 2 : 2 + n[1]] = rows[1]
    index[1, 30 : 30 + n[2]] = rows[2]
    index[2, 1 : 1 + n[1]] = rows[1]
    return PackedImages(index, tuple(images))


def test_every_image_is_on_the_rank_that_shows_it_first():
    one = packed()
    digests = [[image.digest for image in images] for images in images_by_rank(one, 4)]
    first, second, third = (image.digest for image in one.images)
    assert digests == [[first], [second, third], [], []]
    assert list(map(len, images_by_rank(one, 2))) == [3, 0]


@pytest.mark.parametrize(
    ("sizes", "rules"), [({}, TRAIN), (dict(fsdp=2), TRAIN), (dict(fsdp=2, sequence=2), RING)]
)
def test_places_are_those_of_the_patches_and_shapes_are_declared(sizes, rules):
    one, batch = packed(), empty_batch(4, 64)
    n_ranks, merge = sizes.get("fsdp", 1), 4  # patches of a feature
    with jax.set_mesh(make_mesh(**sizes)):
        tower = TowerInputs(encoder(rules))
        put = tower.put(dataclasses.replace(batch, images=one), rules).images
        empty = tower.put(batch, rules).images
        declared = tower.abstract(4, 64, rules)
        index, text = (row_order(np.asarray(a.index), rules) for a in (put, empty))
    shapes = [jax.tree.map(lambda a: (a.shape, a.dtype), images) for images in declared]
    assert jax.tree.map(lambda a: (a.shape, a.dtype), put) in shapes
    assert jax.tree.map(lambda a: (a.shape, a.dtype), empty) == shapes[0]
    assert (text == TEXT).all()
    rows = np.asarray(put.rows.patches)
    assert rows.shape[0] == n_ranks and ((index == TEXT) == (one.index == TEXT)).all()
    flat = rows.reshape(-1, merge, rows.shape[-1])  # by feature
    patches = np.concatenate([image.patches for image in one.images])
    expected = patches.reshape(-1, merge, rows.shape[-1])
    shown = one.index != TEXT
    np.testing.assert_array_equal(flat[index[shown]], expected[one.index[shown]])
