"""Images of episodes, and the features of images in requests to the engine."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxrl.data.images.reader import ImageReader
from jaxrl.engine.api import RequestImage
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.models.decoder import Decoder
from jaxrl.models.vision.tower import Tower
from jaxrl.types import PlacedImage


@dataclasses.dataclass(frozen=True)
class EpisodeImages:
    """Reads the images of environments, and computes the features of those of requests."""

    reader: ImageReader
    encoder: ImageEncoder
    # From training's mesh to the encoder's; None: it has training's tower, or a frozen one.
    move: Callable[[Tower], Tower] | None = None

    def follow(self, model: Decoder) -> None:
        """Computes features by the trained tower of the model, if the encoder is another mesh's."""
        if self.move is not None:
            assert model.tower is not None, "a frozen tower does not move"
            self.encoder.load(self.move(model.tower))


def features_of(
    source: EpisodeImages | None, images: Sequence[PlacedImage]
) -> tuple[RequestImage, ...]:
    """As `request_images`; None in a run without images."""
    return request_images(images, None if source is None else source.encoder)


def request_images(
    images: Sequence[PlacedImage], encoder: ImageEncoder | None
) -> tuple[RequestImage, ...]:
    """The images of a sequence with their features, which `encoder` computes or has kept."""
    if not images:
        return ()
    assert encoder is not None, "prompts have no images without an encoder"
    encoded = encoder.encode([placed.image for placed in images])
    return tuple(
        RequestImage(placed.start, placed.image.grid, placed.image.digest, one.rows, one.deep)
        for placed, one in zip(images, encoded, strict=True)
    )
