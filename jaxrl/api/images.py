"""Images in model inputs: chunks of tokens and of encoded images, as tokens with images in place.

A client sends the tokens around an image, such as its begin and end, and the image in place of its
own tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from jaxrl.data.images.placed import PlacedTokens
from jaxrl.data.images.reader import ImageReader
from jaxrl.http.errors import RequestError
from jaxrl.types import ImageInput, PlacedImage

FORMATS = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}  # the first bytes of a file


@dataclasses.dataclass(frozen=True)
class ImageChunk:
    """An encoded image, and the number of tokens that the client expects it to have."""

    data: bytes
    format: str  # a name of FORMATS
    expected_tokens: int | None = None


Chunk = Int32[np.ndarray, " _"] | ImageChunk


def place_chunks(
    chunks: Sequence[Chunk], reader: ImageReader | None, place: str, param: str
) -> PlacedTokens:
    """The tokens of a model input, with as many placeholders for each image as it has.

    `place` is for messages, `param` the field that has the input. Raises RequestError (400) for
    images that cannot be used, with another number of tokens than expected, and without a reader.
    """
    given = [chunk for chunk in chunks if isinstance(chunk, ImageChunk)]
    try:
        images = iter(_read(given, reader, place) if given else ())
        return _placed(chunks, images, reader, place)
    except ValueError as error:
        raise RequestError(400, str(error), param=param) from error


def _read(
    given: Sequence[ImageChunk], reader: ImageReader | None, place: str
) -> Sequence[ImageInput]:
    if reader is None:
        raise ValueError(
            f"{place} has images, and this server reads none; start it with a vision-language "
            "model and --config.data.images=True"
        )
    for i, chunk in enumerate(given, start=1):
        if not chunk.data.startswith(FORMATS.get(chunk.format, b"\0")):
            raise ValueError(
                f"{place}: image {i} is not in its format {chunk.format!r}; send png or jpeg"
            )
    images = reader.read_references([chunk.data for chunk in given], place)
    for i, (chunk, image) in enumerate(zip(given, images, strict=True), start=1):
        if chunk.expected_tokens not in (None, image.n_tokens):
            raise ValueError(
                f"{place}: image {i} has {image.n_tokens} tokens, and "
                f"expected_tokens={chunk.expected_tokens}; use the image processor of the model"
            )
    return images


def _placed(chunks, images, reader: ImageReader | None, place: str) -> PlacedTokens:
    parts, placed, n = [np.zeros(0, np.int32)], [], 0
    for chunk in chunks:
        if isinstance(chunk, ImageChunk):
            assert reader is not None, "images have been read"
            image = next(images)
            placed.append(PlacedImage(n, image))
            part = np.full(image.n_tokens, reader.placeholders.token, np.int32)
        else:
            part = chunk
            if reader is not None and np.any(part == reader.placeholders.token):
                raise ValueError(
                    f"{place} has the token {reader.placeholders.token} in its text, which is a "
                    "part of an image; send an image chunk in its place"
                )
        parts.append(part)
        n += len(part)
    tokens = np.concatenate(parts)
    if not placed or reader is None:
        return PlacedTokens(tokens)
    inputs = [one.image for one in placed]
    return PlacedTokens(tokens, tuple(placed), reader.placeholders.axis_positions(tokens, inputs))
