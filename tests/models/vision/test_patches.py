"""Places, segments and positions of packed patches, by hand."""

import dataclasses

import numpy as np
import pytest

from jaxrl.models.vision.patches import (
    PatchRows,
    image_layout,
    interpolation,
    n_tokens,
    pack_patches,
)
from jaxrl.models.vision.towers import folder_tower
from tests.models.vision.images import GOLDEN, Image


def tower(name: str, **changes):
    cfg = folder_tower(GOLDEN / name)
    assert cfg is not None
    return dataclasses.replace(cfg, **changes)


def image(cfg, grid, value: float = 1.0) -> Image:
    return Image(np.full((np.prod(grid), cfg.patch_features), value, np.float32), grid)


def test_patches_of_a_token_are_next_to_each_other():
    """2 x 4 patches, 2 x 2 of them a token: the left square, then the right one."""
    layout = image_layout(tower("qwen3_vl"), (1, 2, 4))
    assert layout.places.tolist() == [
        *([0, 0], [0, 1], [1, 0], [1, 1]),
        *([0, 2], [0, 3], [1, 2], [1, 3]),
    ]
    assert layout.source.tolist() == list(range(8))  # Qwen's processor has this order


def test_patches_in_the_order_of_rows_are_brought_into_that_of_tokens():
    """4 x 4 patches in rows: those of the first token are 0, 1 and, in the next row, 4, 5."""
    cfg = tower("gemma3", table=4)  # 2 x 2 patches of a token
    assert image_layout(cfg, (1, 4, 4)).source[:8].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_tokens_of_a_window_are_next_to_each_other_and_return_to_rows():
    """3 x 3 tokens in windows of 2 x 2: 4, 2, 2 and 1 tokens."""
    cfg = tower("qwen2_5_vl", merge=1, window=2)
    layout = image_layout(cfg, (1, 3, 3))
    assert layout.source.tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    assert layout.windows.tolist() == [1, 1, 1, 1, 2, 2, 3, 3, 4]
    assert layout.source[layout.order].tolist() == list(range(9))


def test_frames_do_not_see_each_other():
    layout = image_layout(tower("qwen2_5_vl", merge=1, window=2), (2, 1, 3))
    assert layout.frames.tolist() == [1, 1, 1, 2, 2, 2]
    assert layout.windows.tolist() == [1, 1, 2, 3, 3, 4]
    assert layout.order.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_table_is_stretched_from_corner_to_corner():
    """3 positions on 5 places: the second place is halfway between the first two positions."""
    cfg = tower("qwen3_vl", table=3, merge=1)
    places = np.stack(np.divmod(np.arange(25), 5), axis=-1)
    taps, weights = interpolation(cfg, places, (1, 5, 5))
    table = np.arange(9.0)  # 3 r + c
    got = (table[taps] * weights).sum(1).reshape(5, 5)
    np.testing.assert_allclose(got, np.add.outer(np.arange(5) * 1.5, np.arange(5) * 0.5))
    one, _ = interpolation(cfg, np.zeros((1, 2), np.int64), (1, 1, 1))
    assert one[0, 0] == 0


def test_rows_and_columns_have_separate_positions_and_pixels_another_range():
    """The column is one of the first 20 positions, the row one of the second 20."""
    cfg = tower("gemma4")
    rows = pack_patches(cfg, [[image(cfg, (1, 2, 4), 0.75)]], 12)
    assert rows.taps[0, :4].tolist() == [[0, 20], [1, 20], [0, 21], [1, 21]]
    assert rows.weights[0].tolist() == [[1, 1]] * 8 + [[0, 0]] * 4
    assert set(rows.patches[0, :8].flatten()) == {0.5}  # (0.75 - 0.5) 2
    assert not rows.patches[0, 8:].any()


def test_images_of_a_row_have_their_own_segments_and_windows():
    cfg = tower("qwen2_5_vl")  # 2 x 2 tokens in a window
    rows = pack_patches(cfg, [[image(cfg, (1, 2, 2)), image(cfg, (1, 6, 2), 2.0)], []], 24)
    assert isinstance(rows, PatchRows)
    assert rows.segments[0].tolist() == [1] * 4 + [2] * 12 + [0] * 8
    assert rows.windows[0].tolist() == [1] * 4 + [2] * 8 + [3] * 4 + [0] * 8
    assert rows.order[0].tolist() == list(range(6))
    assert rows.patches[0, :, 0].tolist() == [1] * 4 + [2] * 12 + [0] * 8
    assert not rows.segments[1].any()


def test_an_image_is_as_many_tokens_as_squares_of_patches():
    assert n_tokens(tower("qwen3_vl"), (1, 4, 6)) == 6
    assert n_tokens(tower("gemma3"), (1, 6, 6)) == 9


@pytest.mark.parametrize(
    ("name", "grid", "shape", "message"),
    [
        ("qwen3_vl", (1, 3, 4), (12, 24), "3 x 4 patches and 1 frames has no whole tokens"),
        ("qwen3_vl", (1, 0, 4), (0, 24), "no whole tokens"),
        ("gemma3", (1, 4, 6), (24, 12), "takes images of 6 x 6 patches"),
        ("gemma4", (1, 2, 22), (44, 12), "learned positions for 20 rows and columns"),
        ("qwen3_vl", (1, 2, 2), (4, 12), r"has patches \[4, 12\], expected \[4, 24\]"),
        ("qwen3_vl", (1, 2, 2), (3, 24), r"has patches \[3, 24\], expected \[4, 24\]"),
        ("qwen3_vl", (1, 4, 6), (24, 24), "have 24 patches or more; 16 fit"),
    ],
)
def test_images_that_do_not_fit_are_refused(name, grid, shape, message):
    with pytest.raises(ValueError, match=message):
        n = 36 if name == "gemma3" else 16
        pack_patches(tower(name), [[Image(np.zeros(shape, np.float32), grid)]], n)


def test_rows_of_no_whole_tokens_are_refused():
    with pytest.raises(ValueError, match="set a multiple of 4"):
        pack_patches(tower("qwen3_vl"), [[]], 10)
