"""Images of requests to a worker, whose features travel once while the worker keeps them.

Samples of a prompt and later turns show the same images. Workers have frozen towers' features only,
so those of a digest are the same in the whole run.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.engine.api import Request, RequestImage

KEPT_BYTES = 2**30  # of the features that a worker keeps between dispatches
NO_ROWS = np.zeros((0, 0), np.float32)


@dataclasses.dataclass(frozen=True)
class ImageMessage:
    """The features that a worker gets, and those that it no longer needs."""

    new: tuple[RequestImage, ...] = ()
    dropped: tuple[str, ...] = ()  # digests


class SentImages:
    """The images whose features a worker has, those of the newest requests last."""

    def __init__(self, kept_bytes: int = KEPT_BYTES):
        self._kept_bytes = kept_bytes
        self._n_bytes: dict[str, int] = {}  # by digest

    def send(self, requests: Sequence[Request]) -> tuple[list[Request], ImageMessage]:
        """(the requests without features, the message that the worker reads before them)."""
        images = {image.digest: image for request in requests for image in request.images}
        new = tuple(image for digest, image in images.items() if digest not in self._n_bytes)
        used = {digest: _n_bytes(image) for digest, image in images.items()}
        others = {digest: n for digest, n in self._n_bytes.items() if digest not in used}
        excess, dropped = sum(others.values()) + sum(used.values()) - self._kept_bytes, []
        for digest, n in others.items():  # the oldest ones first
            if excess <= 0:
                break
            dropped.append(digest)
            excess -= n
        kept = {digest: n for digest, n in others.items() if digest not in dropped}
        self._n_bytes = kept | used
        return [_without_features(one) for one in requests], ImageMessage(new, tuple(dropped))


class ReceivedImages:
    """The features that a worker keeps."""

    def __init__(self):
        self._images: dict[str, RequestImage] = {}  # by digest

    def receive(self, message: ImageMessage) -> None:
        for digest in message.dropped:
            del self._images[digest]
        self._images |= {image.digest: image for image in message.new}

    def with_features(self, request: Request) -> Request:
        """The request with the features of its images."""
        return dataclasses.replace(request, images=tuple(map(self._whole, request.images)))

    def _whole(self, image: RequestImage) -> RequestImage:
        found = self._images[image.digest]
        return dataclasses.replace(image, rows=found.rows, deep=found.deep)


def _without_features(request: Request) -> Request:
    if not request.images:
        return request
    images = [dataclasses.replace(one, rows=NO_ROWS, deep=None) for one in request.images]
    return dataclasses.replace(request, images=tuple(images))


def _n_bytes(image: RequestImage) -> int:
    return image.rows.nbytes + (0 if image.deep is None else image.deep.nbytes)
