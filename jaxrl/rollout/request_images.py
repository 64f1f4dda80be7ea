"""The features of images in requests to the engine."""

from collections.abc import Sequence

from jaxrl.engine.api import RequestImage
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.types import PlacedImage


def request_images(
    images: Sequence[PlacedImage], encoder: ImageEncoder | None
) -> tuple[RequestImage, ...]:
    """The images of a prompt with their features, which `encoder` computes or has kept."""
    if not images:
        return ()
    assert encoder is not None, "prompts have no images without an encoder"
    encoded = encoder.encode([placed.image for placed in images])
    return tuple(
        RequestImage(placed.start, placed.image.grid, placed.image.digest, one.rows, one.deep)
        for placed, one in zip(images, encoded, strict=True)
    )
