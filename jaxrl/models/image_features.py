"""Features of images in the decoder: rows in place of embeddings, and sums after the first layers.

A vision tower gives a row of D features for every placeholder token of an image. It replaces the
token's embedding, after the scale of that. Towers with more outputs ("deepstack", Qwen3-VL) also
give rows that are added to the hidden states of these tokens after the first layers
(https://arxiv.org/abs/2406.04334).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.kernels.visibility import Visibility, separate_segments
from jaxrl.models.config import DecoderConfig
from sharding import Rules, unshuffle, zigzag


@struct.dataclass
class ImageFeatures:
    """The features of images at their tokens. What is at tokens of text is not read."""

    rows: Any  # [B, T, D], in place of the embeddings
    is_image: Any  # bool [B, T]
    deep: Any = None  # [B, T, n, D], added after each of the first n layers; None: nothing is

    @classmethod
    def gathered(
        cls,
        rows: Float[Array, "F D"],
        index: Int[Array, "B T"],
        deep: Float[Array, "F n D"] | None,
        rules: Rules,
    ) -> "ImageFeatures":
        """The row `index[b, t]` at each token, which is text where that is negative."""
        index = jax.reshard(index, rules.spec("batch", "time"))
        places = jnp.maximum(index, 0)

        def of_tokens(table: jax.Array, *axes: str | None) -> jax.Array:
            table = jax.reshard(table, rules.spec(None, *axes))
            return table.at[places].get(out_sharding=rules.spec("batch", "time", *axes))

        deep = None if deep is None else of_tokens(deep, None, "embed")
        return cls(of_tokens(rows, "embed"), index >= 0, deep)

    def in_row(self, n_decode: int) -> "ImageFeatures":
        """Rows of prefill as one row with `n_decode` tokens of text after them."""

        def joined(a: jax.Array) -> jax.Array:
            flat = a.reshape(-1, *a.shape[2:])
            return jnp.pad(flat, ((0, n_decode), *[(0, 0)] * (flat.ndim - 1)))[None]

        return jax.tree.map(joined, self)

    @property
    def n_deep(self) -> int:
        return 0 if self.deep is None else self.deep.shape[2]

    def insert(self, x: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T D"]:
        """The embeddings with those of images replaced."""
        return self._at_images(self.rows, x, x.dtype, rules)

    def with_token(self, tokens: Int[Array, "B T"], token: int, rules: Rules) -> Int[Array, "B T"]:
        """The tokens, with this one in the places of images."""
        rows = rules.spec("batch", "time")
        return jnp.where(jax.reshard(self.is_image, rows), token, jax.reshard(tokens, rows))

    def deep_sums(self, dtype: DTypeLike, rules: Rules) -> Float[Array, "n B T D"] | None:
        """The rows that are added to the hidden states after each of the first layers."""
        if self.deep is None:
            return None
        parts = [self.deep[:, :, i] for i in range(self.n_deep)]
        return jnp.stack([self._at_images(part, 0, dtype, rules) for part in parts])

    def _at_images(
        self, rows: Float[Array, "B T D"], text: Any, dtype: DTypeLike, rules: Rules
    ) -> Float[Array, "B T D"]:
        """`rows` at tokens of images, `text` at the others."""
        rows = jax.reshard(rows.astype(dtype), rules.spec("batch", "time", "embed"))
        is_image = jax.reshard(self.is_image, rules.spec("batch", "time"))
        return jnp.where(is_image[..., None], rows, text)


@struct.dataclass
class PackedPatches:
    """The images of a micro-batch as the inputs of a tower, which runs inside of its program."""

    rows: Any  # PatchRows of the images, a row for each data-parallel rank
    index: Any  # int32 [B, T], the row of features of each token; negative: text

    def features(
        self, out: Float[Array, "R F D"], deep: Sequence[Float[Array, "R F D"]], rules: Rules
    ) -> ImageFeatures:
        """The outputs of the tower at their tokens."""

        def table(x: jax.Array) -> jax.Array:
            whole = jax.reshard(x, rules.spec(*[None] * (x.ndim - 1), "embed"))
            return whole.reshape(-1, *x.shape[2:])

        stacked = table(jnp.stack(deep, axis=2)) if deep else None
        return ImageFeatures.gathered(table(out), self.index, stacked, rules)


def whole_images(cfg: DecoderConfig) -> bool:
    """Whether the tokens of an image see each other in some layers."""
    return any(mixer.whole_images for mixer in cfg.attention_layers)


def check_images(cfg: DecoderConfig, features: ImageFeatures | None, axis_positions: Any) -> None:
    """Raises ValueError for what the model does not compute."""
    sections = {mixer.rope.mrope_section for mixer in cfg.attention_layers} or {()}
    if axis_positions is not None and () in sections:
        raise ValueError(
            f"this {cfg.family} model has no mrope_section, so its tokens have one position each; "
            "leave out the positions by axis"
        )
    if features is None:
        return
    if axis_positions is None and () not in sections:
        raise ValueError(
            f"images of this {cfg.family} model have positions by axis (mrope_section); pass the "
            "axis_positions of mrope_positions with their features"
        )
    if features.n_deep > cfg.L:
        raise ValueError(f"deepstack features of {features.n_deep} layers for {cfg.L} layers")


def check_paged_images(
    cfg: DecoderConfig, features: ImageFeatures | None, rotary: Any, ahead: Any = None
) -> None:
    """`check_images` of new tokens with a KV cache, of which `rotary` may have one position each.

    Raises ValueError for images whose tokens see each other without the positions `ahead`.
    """
    by_axis = rotary if rotary is not None and rotary.ndim == 3 else None
    check_images(cfg, features, by_axis)
    if features is not None and ahead is None and whole_images(cfg):
        raise ValueError(
            f"the tokens of an image of this {cfg.family} model see each other; pass the last "
            "position that each token sees (`ahead`), with all tokens of an image in one call"
        )


def image_visibility(
    cfg: DecoderConfig,
    features: ImageFeatures | None,
    segments: Int[Array, "B T"],
    visibility: Visibility | None,
    rules: Rules,
) -> Visibility | None:
    """The visibility of layers in which the tokens of an image see each other; None without them.

    An image is a run of its tokens within a segment, as in transformers.
    """
    if features is None or not whole_images(cfg):
        return None
    rows = rules.spec("batch", None)

    def in_order(a: jax.Array) -> jax.Array:
        return unshuffle(jax.reshard(a, rows), rules)

    def as_given(a: jax.Array) -> jax.Array:
        if not rules.ring:
            return a
        return a.at[:, zigzag(a.shape[1], rules.ring_size)].get(out_sharding=rows)

    segments, image = in_order(segments), in_order(features.is_image)
    T, places = segments.shape[1], lax.broadcasted_iota(jnp.int32, segments.shape, 1)
    stays = image[:, :-1] & image[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    ends = jnp.where(jnp.pad(stays, ((0, 0), (0, 1))), T, places)
    last = as_given(lax.cummin(ends, axis=1, reverse=True))
    causal = visibility or jax.tree.map(as_given, separate_segments(segments))
    return dataclasses.replace(causal, ahead=last)
