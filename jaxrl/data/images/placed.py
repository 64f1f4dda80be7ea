"""Tokens that a model reads, with images at their places: a prompt, or a part of a conversation."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxrl.data.images.mrope import join_positions, text_positions
from jaxrl.types import PlacedImage, Prompt


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedTokens:
    """Tokens with as many placeholders for each image as it has."""

    tokens: Int32[np.ndarray, " T"]
    images: tuple[PlacedImage, ...] = ()
    axis_positions: Int32[np.ndarray, "3 T"] | None = None  # None: those of text

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a `Prompt` with these tokens."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def digests(self) -> list[str]:
        """The content of each image."""
        return [placed.image.digest for placed in self.images]

    def then(self, further: "PlacedTokens") -> "PlacedTokens":
        """These tokens, followed by others whose places and positions begin at 0."""
        n, axes = len(self), None
        if self.axis_positions is not None or further.axis_positions is not None:
            axes = join_positions(self._axes, further._axes)
        moved = (dataclasses.replace(one, start=n + one.start) for one in further.images)
        tokens = np.concatenate([self.tokens, further.tokens])
        return PlacedTokens(tokens, (*self.images, *moved), axes)

    def first(self, n: int) -> "PlacedTokens":
        """The first `n` tokens, which have no image in part."""
        axes = self.axis_positions
        images = tuple(placed for placed in self.images if placed.end <= n)
        return PlacedTokens(self.tokens[:n], images, None if axes is None else axes[:, :n])

    @property
    def _axes(self) -> Int32[np.ndarray, "3 T"]:
        return text_positions(len(self)) if self.axis_positions is None else self.axis_positions


def prompt_tokens(prompt: Prompt) -> PlacedTokens:
    """The tokens of a prompt with its images."""
    return PlacedTokens(prompt.tokens, prompt.images, prompt.axis_positions)
