"""Positions by axis of tokens with images (M-RoPE, https://arxiv.org/abs/2409.12191).

A token of text has three equal positions, which count on from token to token. The tokens of an
image have the positions of its grid, from that of the token after the text before it on; the text
after an image continues after the longer side of its grid. So after an image positions are smaller
than indices, by a number that all tokens after the last image share. The definition is
`get_rope_index` of Qwen2.5-VL, Qwen3-VL and Qwen3.5 in transformers, for images.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from jaxrl.types import Grid


def mrope_positions(
    tokens: Int32[np.ndarray, " T"], grids: Sequence[Grid], *, image_token: int, merge: int
) -> tuple[Int32[np.ndarray, "3 T"], int]:
    """(positions by time, height and width, delta) of tokens with one placeholder per feature.

    `image_token` is the placeholder, `merge` the patches of a feature on each side. The position of
    a token after the last image is its index plus delta.

    Raises ValueError if the placeholders are not those of the images, in order.
    """
    of_image = tokens == image_token
    parts: list[np.ndarray] = [np.zeros((3, 0), np.int64)]
    start, position = 0, 0
    for i, (time, height, width) in enumerate(grids):
        sizes = time, height // merge, width // merge
        n, places = int(np.prod(sizes)), np.flatnonzero(of_image[start:])
        begin = start + int(places[0]) if len(places) else len(tokens)
        if int(of_image[begin : begin + n].sum()) != n:
            raise ValueError(
                f"image {i} has {n} features of a grid of {time} x {height} x {width} patches, and "
                f"the tokens have {int(of_image[begin : begin + n].sum())} placeholders in its "
                "place; expand each image to its number of features"
            )
        parts.append(_of_text(begin - start, position))
        position += begin - start
        parts.append(np.indices(sizes).reshape(3, -1) + position)
        position, start = position + max(height, width) // merge, begin + n
    if of_image[start:].any():
        raise ValueError(
            f"the tokens have {int(of_image[start:].sum())} placeholders after those of "
            f"{len(grids)} images; expand each image to its number of features"
        )
    parts.append(_of_text(len(tokens) - start, position))
    positions = np.concatenate(parts, axis=1)
    delta = int(positions.max(initial=-1)) + 1 - len(tokens)
    return positions.astype(np.int32), delta


def continue_text(positions: Int32[np.ndarray, "3 T"], n: int) -> Int32[np.ndarray, "3 N"]:
    """Positions by axis of the tokens and of `n` tokens of text after them."""
    return join_positions(positions, text_positions(n))


def join_positions(
    positions: Int32[np.ndarray, "3 T"], further: Int32[np.ndarray, "3 N"]
) -> Int32[np.ndarray, "3 M"]:
    """Positions by axis of the tokens and of those after them, whose own begin at 0."""
    return np.concatenate([positions, further + positions.max(initial=-1) + 1], axis=1)


def text_positions(n: int) -> Int32[np.ndarray, "3 N"]:
    """Positions by axis of `n` tokens of text."""
    return _of_text(n, 0).astype(np.int32)


def _of_text(n: int, position: int) -> np.ndarray:
    """Three equal positions of each of `n` tokens, [3, n]."""
    return np.broadcast_to(position + np.arange(n), (3, n))
