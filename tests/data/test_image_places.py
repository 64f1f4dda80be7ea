"""Tests of jaxrl/data/image_places.py, and of packing samples with images."""

import numpy as np

from jaxrl.data.image_places import (
    TEXT,
    PackedImages,
    between_images,
    join_axis_positions,
    join_packed_images,
)
from jaxrl.data.packing import pack
from jaxrl.data.rows import sharing_order
from jaxrl.types import ImageInput, PlacedImage, TrainingSample

IMAGE = 9


def image(n_tokens: int, digest: str) -> ImageInput:
    return ImageInput((1, 2, 2 * n_tokens), n_tokens, digest, load=lambda: np.zeros(0))


def sample(prompt, response, *images, axes=None):
    """A sample with images (start, tokens, digest)."""
    return TrainingSample(
        prompt_tokens=np.array(prompt, np.int32),
        tokens=np.array(response, np.int32),
        loss_mask=np.ones(len(response), bool),
        images=tuple(PlacedImage(start, image(*content)) for start, *content in images),
        axis_positions=axes,
    )


PROMPT = [1, IMAGE, IMAGE, 2, 3]


def test_samples_of_a_prompt_have_its_image_once():
    axes = np.arange(21, dtype=np.int32).reshape(3, 7)
    samples = [sample(PROMPT, response, (1, 2, "a"), axes=axes) for response in ([4, 5], [6, 7])]
    [packed] = pack(samples, shapes=((1, 16),), align=4, n_ranks=1, share_prefixes=True)
    batch = packed.batch
    # The second sample leaves out 4 tokens and begins at 8, the next multiple of 4.
    np.testing.assert_array_equal(batch.tokens[0, :10], [1, 9, 9, 2, 3, 4, 0, 0, 3, 6])
    np.testing.assert_array_equal(batch.images.index[0, :10], [-1, 0, 1, *[-1] * 7])
    assert batch.images.images == (image(2, "a"),)
    np.testing.assert_array_equal(batch.axis_positions[0, :6], axes[:, :6].T)
    np.testing.assert_array_equal(batch.axis_positions[0, 8:10], axes[:, 4:6].T)


def test_equal_tokens_with_different_images_share_no_prefix():
    samples = [sample(PROMPT, [4, 5], (1, 2, digest)) for digest in "ab"]
    lens = np.array([6, 6])
    assert sharing_order(samples, lens, 1).shared.tolist() == [0, 1]
    same = [sample(PROMPT, [4, 5], (1, 2, "a"))] * 2
    assert sharing_order(same, lens, 1).shared.tolist() == [0, 4]
    [packed] = pack(samples, shapes=((1, 16),), align=4, n_ranks=1, share_prefixes=True)
    assert packed.batch.images.first_rows == {"a": 0, "b": 2}
    index = packed.batch.images.index[0].reshape(2, 8)  # a row of 16 has both samples
    assert sorted(index[:, 1:3].tolist()) == [[0, 1], [2, 3]]


def test_a_shared_prefix_does_not_divide_an_image():
    one = sample([1, *[IMAGE] * 6, 2, 3], [4], (1, 2, "a"), (3, 4, "b"))
    assert [between_images(one, n, 1) for n in range(9)] == [0, 1, 1, 3, 3, 3, 3, 7, 8]
    assert between_images(one, 5, 2) == 0  # 4 is in b, and 2 in a


def test_batches_without_images_are_as_before():
    [packed] = pack([sample(PROMPT, [4, 5])], shapes=((1, 8),), align=4, n_ranks=1)
    assert packed.batch.images is packed.batch.axis_positions is None


def test_joined_micro_batches_have_every_image_once():
    index = np.array([[TEXT, 0, 1]], np.int32)
    parts = [
        PackedImages(index, (image(1, "a"), image(1, "b"))),
        None,
        PackedImages(index, (image(1, "b"), image(2, "c"))),
    ]
    joined = join_packed_images(parts)
    assert joined.first_rows == {"a": 0, "b": 1, "c": 2}
    assert sum(one.n_tokens for one in joined.images) == 4
    np.testing.assert_array_equal(joined.index, [[-1, 0, 1], [-1, -1, -1], [-1, 1, 2]])
    assert join_packed_images([None, None]) is None
    positions, axes = np.array([[0, 1]], np.int32), np.zeros((1, 2, 3), np.int32)
    found = join_axis_positions([(None, positions), (axes, positions)])
    np.testing.assert_array_equal(found, [[[0] * 3, [1] * 3], [[0] * 3] * 2])
    assert join_axis_positions([(None, positions)]) is None
