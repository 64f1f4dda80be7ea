"""Reads the images of many rows for a model, in threads."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl.config.keys import DataConfig
from jaxrl.data.images.decoding import UnusableImageError, find_source
from jaxrl.data.images.processing import ImageProcessor
from jaxrl.data.images.references import ImageReference, mark_parts
from jaxrl.data.sources.rows import Dropped, SourceRow
from jaxrl.types import ImageInput

N_RECENT = 256  # images that are not decoded again
RowImages = tuple[SourceRow, tuple[ImageInput, ...]]  # a row with marked places, its images
# (columns of a row, its place) -> as `mark_images`, for the columns of its messages
Marker = Callable[[Mapping[str, Any], str], tuple[dict[str, Any], list[ImageReference]]]


class ImageReader:
    """Reads the images of rows as inputs of the model in a folder.

    Raises ValueError for a model without images and for wrong settings.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, data: DataConfig):
        self._processor = ImageProcessor(folder, data.image_kwargs, data.max_image_pixels)
        # Agents send the images of all turns with each request
        self._of_bytes = functools.lru_cache(N_RECENT)(self._processor.image)
        self._root, self._drops = data.image_root, data.on_error == "drop"
        if self._root and not Path(self._root).expanduser().is_dir():
            raise ValueError(
                f"data.image_root = {self._root} is not a folder; set it to the folder that has "
                "the images"
            )
        self._advice = (
            ""
            if self._drops
            else ". Correct or remove the row, or set data.on_error=drop to drop such rows"
        )
        self.placeholders = self._processor.placeholders(tokenizer)

    def differences(self, other: "ImageReader") -> list[str]:
        """The differences between the inputs that two models make of an image, in words."""
        found = self._processor.differences(other._processor)
        if self.placeholders != other.placeholders:
            found.append(f"image tokens {self.placeholders} and {other.placeholders}")
        return found

    def read(self, rows: Sequence[SourceRow], mark: Marker, dropped: Dropped) -> list[RowImages]:
        """The rows with IMAGE at the places of their images, and these images.

        Raises ValueError with the place for a row whose images cannot be used. With
        data.on_error="drop", rows with images that are missing, damaged, too large or of another
        form are left out, and their errors go to `dropped`.
        """
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # decoders and numpy release the GIL
            found = list(threads.map(lambda row: self._read_row(row, mark), rows))
        dropped.errors += [str(one) for one in found if isinstance(one, UnusableImageError)]
        return [one for one in found if not isinstance(one, UnusableImageError)]

    def read_messages(self, messages: Any) -> tuple[Any, tuple[ImageInput, ...]]:
        """(messages with IMAGE at the places of their content parts of images, these images).

        Raises ValueError for an image that cannot be used.
        """
        marked, references = mark_parts(messages, "messages")
        return marked, self.read_references(references, "messages")

    def read_references(
        self, references: Sequence[ImageReference], place: str
    ) -> tuple[ImageInput, ...]:
        """The images that are named in `place`. Raises ValueError for one that cannot be used."""
        return tuple(self._image(one, place, i, advice="") for i, one in enumerate(references))

    def _read_row(self, row: SourceRow, mark: Marker) -> RowImages | UnusableImageError:
        marked, references = mark(row.columns, row.place)
        try:
            images = tuple(
                self._image(reference, row.place, i, self._advice)
                for i, reference in enumerate(references)
            )
        except UnusableImageError as error:
            if self._drops:
                return error
            raise
        return dataclasses.replace(row, columns=marked), images

    def _image(self, reference: ImageReference, place: str, i: int, advice: str) -> ImageInput:
        """One image. The message of a ValueError begins with its place.

        `advice` is the end of the message for an image that cannot be used.
        """
        try:
            source = find_source(reference, self._root)
            if isinstance(source, Path):  # which may change
                return self._processor.image(source, str(source))
            return self._of_bytes(source, f"image {i + 1}")
        except UnusableImageError as error:
            raise UnusableImageError(f"{place}: {error}{advice}") from error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


def read_images(
    rows: Sequence[SourceRow], images: ImageReader | None, mark: Marker, dropped: Dropped
) -> tuple[Sequence[SourceRow], Sequence[tuple[ImageInput, ...]]]:
    """(the rows with the places of their images marked, the images of each row).

    As `ImageReader.read`; without a reader the rows as they are, and no images.
    """
    if images is None:
        return rows, [()] * len(rows)
    pairs = images.read(rows, mark, dropped)
    return [row for row, _ in pairs], [inputs for _, inputs in pairs]
