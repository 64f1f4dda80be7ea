"""The place of an image: in the text of a message, in a rendered prompt, and in its tokens."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from jaxrl.data.images.decoding import data_url
from jaxrl.data.images.mrope import mrope_positions
from jaxrl.data.images.references import IMAGE
from jaxrl.json_text import Message
from jaxrl.types import ImageInput, PlacedImage

_ADVICE = (
    "Write the place of an image as <image>, or as a content part, and remove the model's own "
    "image tokens from the text"
)


@dataclasses.dataclass(frozen=True)
class Placeholders:
    """How the prompts of a model have an image.

    The model reads `framed` where its chat template writes `rendered`. The token `token` in it is
    repeated: an image of n tokens has n of them.
    """

    rendered: str
    framed: str
    token: int
    merge: int = 0  # patches on each side of a token, for positions by axis; 0: one position each

    def check_text(self, messages: Sequence[Message]) -> None:
        """Raises ValueError if the text of a message contains an image token of the model."""
        for i, message in enumerate(messages):
            text = str(message.get("content"))
            if found := next((own for own in (self.rendered, self.framed) if own in text), ""):
                raise ValueError(
                    f"the text of turn {i} ({message['role']}) contains {found!r}, an image token "
                    f"of the model. {_ADVICE}"
                )

    def frame(self, text: str, n_images: int) -> str:
        """The rendered text as the model reads it. Raises ValueError for more or fewer images."""
        if (found := text.count(self.rendered)) < n_images:
            raise ValueError(
                f"the chat template writes {found} of {n_images} images ({self.rendered!r}); set "
                "data.chat_template to one that renders images"
            )
        if found > n_images:
            raise ValueError(
                f"the rendered text has {found} image tokens ({self.rendered!r}) for {n_images} "
                f"images. {_ADVICE}"
            )
        return text.replace(self.rendered, self.framed)

    def expand(
        self, tokens: Int32[np.ndarray, " _"], images: Sequence[ImageInput]
    ) -> Int32[np.ndarray, " _"]:
        """The tokens of a prompt with n tokens in place of each image's one.

        Raises ValueError for more or fewer placeholders than images.
        """
        places = np.flatnonzero(tokens == self.token)
        if len(places) != len(images):
            raise ValueError(
                f"the prompt has {len(places)} image tokens ({self.framed!r}) for {len(images)} "
                f"images. {_ADVICE}"
            )
        return np.repeat(tokens, self.n_each(tokens, images))

    def n_each(
        self, tokens: Int32[np.ndarray, " _"], images: Sequence[ImageInput]
    ) -> Int[np.ndarray, " _"]:
        """How often `expand` repeats each token."""
        counts = np.ones(len(tokens), int)
        counts[tokens == self.token] = [image.n_tokens for image in images]
        return counts

    def fields(
        self, tokens: Int32[np.ndarray, " T"], images: Sequence[ImageInput]
    ) -> dict[str, Any]:
        """The fields `images` and `axis_positions` of expanded tokens; none without images."""
        if not images:
            return {}
        axes = self.axis_positions(tokens, images)
        return dict(images=self.place(tokens, images), axis_positions=axes)

    def place(
        self, tokens: Int32[np.ndarray, " T"], images: Sequence[ImageInput]
    ) -> tuple[PlacedImage, ...]:
        """The images at their placeholders in expanded tokens, which have exactly theirs."""
        places = np.flatnonzero(tokens == self.token)
        firsts = itertools.accumulate((image.n_tokens for image in images[:-1]), initial=0)
        return tuple(
            PlacedImage(int(places[first]), image)
            for first, image in zip(firsts, images, strict=False)
        )

    def axis_positions(
        self, tokens: Int32[np.ndarray, " T"], images: Sequence[ImageInput]
    ) -> Int32[np.ndarray, "3 T"] | None:
        """Positions by axis of expanded tokens; None if the model has none."""
        if not self.merge:
            return None
        grids = [image.grid for image in images]
        return mrope_positions(tokens, grids, image_token=self.token, merge=self.merge)[0]

    def check_cut(self, tokens: np.ndarray, kept: np.ndarray, place: str) -> None:
        """Raises ValueError if a prompt's tokens lose one of an image, or of its frame.

        `kept` [n] are the indices of the tokens that remain.
        """
        of_image = tokens == self.token
        framed = of_image.copy()
        framed[:-1] |= of_image[1:]
        framed[1:] |= of_image[:-1]
        if np.delete(framed, kept).any():
            raise ValueError(
                f"{place}: the prompt has {len(tokens)} tokens, and its truncation to {len(kept)} "
                "would cut an image; raise data.max_prompt_len, lower the sizes of images with "
                "data.image_kwargs, or set data.filter_overlong_prompts=True"
            )


def with_parts(messages: Sequence[Message]) -> list[Message]:
    """The messages as chat templates read images: content parts in place of text with images."""
    return [
        message | {"content": list(_parts(text))}
        if isinstance(text := message.get("content"), str) and IMAGE in text
        else message
        for message in messages
    ]


def with_own_images(messages: Sequence[Message], images: Sequence[ImageInput]) -> list[Message]:
    """The messages with their images as OpenAI's content parts, in place of text with images."""
    rest = iter(images)
    return [
        message | {"content": [_own(part, rest) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in with_parts(messages)
    ]


def n_images(messages: Sequence[Message]) -> int:
    """Number of images in the text of the messages."""
    texts = (message.get("content") for message in messages)
    return sum(text.count(IMAGE) for text in texts if isinstance(text, str))


def _parts(text: str) -> Iterator[dict[str, Any]]:
    for i, piece in enumerate(text.split(IMAGE)):
        if i:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


def _own(part: dict[str, Any], images: Iterator[ImageInput]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    encoded = next(images).encoded
    assert encoded is not None, "images of prompts are read from files"
    return {"type": "image_url", "image_url": {"url": data_url(encoded())}}
