"""Images of packed rows: the row of features of every token, and positions by axis (M-RoPE).

A micro-batch has every image once, whatever the number of samples and places that show it, so a
vision tower runs once for it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int32

from jaxrl.types import ImageInput, TrainingSample

TEXT = -1  # in place of a row of features: the token is not one of an image
# A sample, the place of its first token in a flat micro-batch, and the tokens that it leaves out
# because an earlier sample of its row has them.
Located = tuple[TrainingSample, int, int]


@dataclasses.dataclass(frozen=True)
class PackedImages:
    """The images of a micro-batch [B, T], whose features follow each other in this order."""

    index: np.ndarray  # int32 [B, T], the row of features of each token, or TEXT
    images: tuple[ImageInput, ...]

    @property
    def first_rows(self) -> dict[str, int]:
        """The first row of features of each image, by digest."""
        counts = itertools.accumulate((image.n_tokens for image in self.images), initial=0)
        return {image.digest: n for image, n in zip(self.images, counts, strict=False)}

    def moved(self, first: Mapping[str, int]) -> Int32[np.ndarray, "B T"]:
        """The index with other first rows, of every image that the micro-batch shows."""
        rows = [first.get(image.digest, 0) + np.arange(image.n_tokens) for image in self.images]
        table = np.concatenate([*rows, [TEXT]])  # TEXT is the last place
        return table[self.index].astype(np.int32)


def n_inputs(sample: TrainingSample) -> int:
    """Tokens of a sample in a row: the last one is a target only."""
    return len(sample.prompt_tokens) + len(sample.tokens) - 1


def pack_images(located: Sequence[Located], shape: tuple[int, int]) -> PackedImages | None:
    """The images of a micro-batch of this shape; None without any."""
    if not any(sample.images for sample, *_ in located):
        return None
    every = (placed.image for sample, *_ in located for placed in sample.images)
    packed = PackedImages(np.full(shape, TEXT, np.int32), unique_images(every))
    flat, first = packed.index.reshape(-1), packed.first_rows
    for sample, place, skipped in located:
        for placed in sample.images:
            begin, end = max(placed.start, skipped), min(placed.end, n_inputs(sample))
            if begin < end:
                rows = first[placed.image.digest] + np.arange(begin, end) - placed.start
                flat[place + begin - skipped : place + end - skipped] = rows
    return packed


def unique_images(images: Iterable[ImageInput]) -> tuple[ImageInput, ...]:
    """The images of different content, in the order in which they occur."""
    return tuple({image.digest: image for image in images}.values())


def join_packed_images(parts: Sequence[PackedImages | None]) -> PackedImages | None:
    """The images of micro-batches of one shape, concatenated by rows; each image once."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    images = unique_images(image for part in found for image in part.images)
    joined = PackedImages(np.full((0, found[0].index.shape[1]), TEXT, np.int32), images)
    text = np.full_like(found[0].index, TEXT)
    index = [text if part is None else part.moved(joined.first_rows) for part in parts]
    return PackedImages(np.concatenate(index), images)


def pack_axis_positions(
    located: Sequence[Located], positions: Int32[np.ndarray, "B T"]
) -> Int32[np.ndarray, "B T 3"] | None:
    """Positions by axis; those of `positions` where a sample has none. None if no sample has."""
    if all(sample.axis_positions is None for sample, *_ in located):
        return None
    axes = by_axis(positions)
    flat = axes.reshape(-1, 3)
    for sample, place, skipped in located:
        if sample.axis_positions is not None:
            own = sample.axis_positions[:, skipped : n_inputs(sample)]
            flat[place : place + own.shape[1]] = own.T
    return axes


def join_axis_positions(
    parts: Sequence[tuple[np.ndarray | None, np.ndarray]],
) -> Int32[np.ndarray, "B T 3"] | None:
    """Those of micro-batches (positions by axis or None, positions), concatenated by rows."""
    if all(axes is None for axes, _ in parts):
        return None
    return np.concatenate([by_axis(own) if axes is None else axes for axes, own in parts])


def by_axis(positions: Int32[np.ndarray, "B T"]) -> Int32[np.ndarray, "B T 3"]:
    """Three equal positions of each token."""
    return np.repeat(positions[..., None], 3, axis=-1)


def content_tokens(samples: Sequence[TrainingSample]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt, response) of each sample, whose placeholders are a number of their image.

    Prompts with equal tokens and different images have different content.
    """
    numbers: dict[str, int] = {}

    def content(sample: TrainingSample) -> tuple[np.ndarray, np.ndarray]:
        if not sample.images:
            return sample.prompt_tokens, sample.tokens
        tokens = np.concatenate([sample.prompt_tokens, sample.tokens]).astype(np.int32)
        for placed in sample.images:
            number = numbers.setdefault(placed.image.digest, -1 - len(numbers))
            tokens[placed.start : placed.end] = number
        n = len(sample.prompt_tokens)
        return tokens[:n], tokens[n:]

    return [content(sample) for sample in samples]


def is_text(sample: TrainingSample) -> Bool[np.ndarray, " T"]:
    """Whether each token of the response is none of an image."""
    n, mask = len(sample.prompt_tokens), np.ones(len(sample.tokens), bool)
    for placed in sample.images:
        mask[max(placed.start - n, 0) : max(placed.end - n, 0)] = False
    return mask


def between_images(sample: TrainingSample, n: int, align: int) -> int:
    """The largest multiple of `align` up to `n` at which no image of the sample is divided.

    The tokens of an image may see each other, and a row has all of them or none.
    """
    n = n // align * align
    for placed in reversed(sample.images):
        if placed.start < n < placed.end:
            n = placed.start // align * align
    return n
