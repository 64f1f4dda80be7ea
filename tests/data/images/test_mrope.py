"""Positions of tokens with images, against `get_rope_index` of transformers.

Tests of jaxrl.data.images.mrope.py and of `Rope.pair_axes`.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl.data.images.mrope import mrope_positions
from jaxrl.models.rope_config import Rope

IMAGE, MERGE = 60, 2
GOLDEN = Path(__file__).parents[2] / "models" / "golden_images" / "positions.json"


def tokens_of(parts) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """(tokens, grids) of texts, by their length, and images, by their grid."""
    grids = [tuple(part) for part in parts if not isinstance(part, int)]
    tokens = [
        np.full(part, 7) if isinstance(part, int) else np.full(np.prod(part) // MERGE**2, IMAGE)
        for part in parts
    ]
    return np.concatenate(tokens).astype(np.int32), grids


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()))
def test_positions_and_delta_are_those_of_transformers(case):
    tokens, grids = tokens_of(case["parts"])
    positions, delta = mrope_positions(tokens, grids, image_token=IMAGE, merge=MERGE)
    np.testing.assert_array_equal(positions, case["positions"])
    assert positions.dtype == np.int32 and delta == case["delta"]


def test_adjacent_images_are_separated_by_their_grids():
    # 2 x 1 features from position 1 on, then 1 x 2 from 1 + 2 on; the text continues at 3 + 2.
    tokens, grids = tokens_of([1, (1, 4, 2), (1, 2, 4), 1])
    positions, delta = mrope_positions(tokens, grids, image_token=IMAGE, merge=MERGE)
    assert positions.tolist() == [[0, 1, 1, 3, 3, 5], [0, 1, 2, 3, 3, 5], [0, 1, 1, 3, 4, 5]]
    assert delta == 0


@pytest.mark.parametrize(
    ("parts", "grids", "message"),
    [
        ([3, (1, 4, 4), 2], [], "4 placeholders after those of 0 images"),
        ([3, (1, 4, 4), 2], [(1, 4, 4), (1, 2, 2)], "image 1 has 1 features .* 0 placeholders"),
        ([3, (1, 4, 4), 2], [(1, 4, 6)], "image 0 has 6 features .* 4 placeholders"),
    ],
)
def test_placeholders_that_are_not_those_of_the_images_are_refused(parts, grids, message):
    tokens, _ = tokens_of(parts)
    with pytest.raises(ValueError, match=message):
        mrope_positions(tokens, grids, image_token=IMAGE, merge=MERGE)


def test_the_axes_of_pairs_by_hand():
    assert Rope().pair_axes(8) == ()
    assert Rope(mrope_section=(1, 2, 1), mrope_chunked=True).pair_axes(4) == (0, 1, 1, 2)
    # Height has every third pair from 1 on, below 3 * 2; width from 2 on, below 3 * 1.
    assert Rope(mrope_section=(4, 2, 1)).pair_axes(7) == (0, 1, 2, 0, 1, 0, 0)
    with pytest.raises(ValueError, match="4 pairs of features, and 8 are rotated"):
        Rope(mrope_section=(1, 2, 1), mrope_chunked=True).pair_axes(8)
