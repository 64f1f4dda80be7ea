"""Features of images in the decoder: rows in place of embeddings, and sums after the first layers.

A vision tower gives a row of D features for every placeholder token of an image. It replaces the
token's embedding, after the scale of that. Towers with more outputs ("deepstack", Qwen3-VL) also
give rows that are added to the hidden states of these tokens after the first layers
(https://arxiv.org/abs/2406.04334).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.visibility import Visibility, separate_segments
from jaxrl.models.config import DecoderConfig
from sharding import Rules, unshuffle, zigzag

TEXT = -1  # in `ImageFeatures.index`: the token is not one of an image


@struct.dataclass
class ImageFeatures:
    """The features of the images of packed rows. An image may be in several places."""

    rows: Any  # [F, D], in place of the embeddings
    index: Any  # int32 [B, T], the row of each token, or TEXT
    deep: Any = None  # [n, F, D], added after each of the first n layers; None: nothing is

    @classmethod
    def at(
        cls,
        rows: Float[Array, "F D"],
        places: Int[Array, "F"],
        shape: tuple[int, int],
        deep: Float[Array, "n F D"] | None = None,
    ) -> "ImageFeatures":
        """Row f at the token with index `places[f]` of the flat tokens [B * T].

        A row whose place is not one of these, such as padding, is at no token.
        """
        n = shape[0] * shape[1]
        places = jnp.where((places >= 0) & (places < n), places, n)
        found = jnp.arange(len(places), dtype=jnp.int32)
        index = jnp.full(n, TEXT, jnp.int32).at[places].set(found, mode="drop")
        return cls(rows, index.reshape(shape), deep)

    def in_row(self, n_decode: int) -> "ImageFeatures":
        """Of rows of prefill, as one row with `n_decode` tokens of text after them."""
        index = jnp.pad(self.index.reshape(-1), (0, n_decode), constant_values=TEXT)
        return ImageFeatures(self.rows, index[None], self.deep)

    @property
    def is_image(self) -> Bool[Array, "B T"]:
        return self.index >= 0

    @property
    def n_deep(self) -> int:
        return 0 if self.deep is None else len(self.deep)

    def insert(self, x: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T D"]:
        """The embeddings with those of images replaced."""
        found = self._of_tokens(self.rows, x.dtype, rules)
        return jnp.where(self._index(rules)[..., None] >= 0, found, x)

    def deep_sums(self, dtype: DTypeLike, rules: Rules) -> Float[Array, "n B T D"] | None:
        """What is added to the hidden states after each of the first layers."""
        if self.deep is None:
            return None
        image = self._index(rules)[..., None] >= 0
        sums = [jnp.where(image, self._of_tokens(rows, dtype, rules), 0) for rows in self.deep]
        return jnp.stack(sums)

    def _index(self, rules: Rules) -> Int[Array, "B T"]:
        return jax.reshard(self.index, rules.spec("batch", "time"))

    def _of_tokens(
        self, rows: Float[Array, "F D"], dtype: DTypeLike, rules: Rules
    ) -> Float[Array, "B T D"]:
        """The row of each token; any row at tokens of text."""
        rows = jax.reshard(rows.astype(dtype), rules.spec(None, "embed"))
        index = jnp.maximum(self._index(rules), 0)
        return rows.at[index].get(out_sharding=rules.spec("batch", "time", "embed"))


def check_images(cfg: DecoderConfig, features: ImageFeatures | None, axis_positions: Any) -> None:
    """Raises ValueError or NotImplementedError for what the model does not compute."""
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
    if cfg.input_P:
        raise NotImplementedError(
            f"images are not supported for this {cfg.family} model, whose layers have inputs by "
            "token (hidden_size_per_layer_input); leave out images"
        )
    if features.n_deep > cfg.L:
        raise ValueError(f"deepstack features of {features.n_deep} layers for {cfg.L} layers")


def check_paged_images(cfg: DecoderConfig, features: ImageFeatures | None, rotary: Any) -> None:
    """`check_images` of new tokens with a KV cache, of which `rotary` may have one position each.

    Raises NotImplementedError for images whose tokens see each other: a chunk of prefill would need
    all tokens of an image.
    """
    by_axis = rotary if rotary is not None and rotary.ndim == 3 else None
    check_images(cfg, features, by_axis)
    if features is not None and any(mixer.whole_images for mixer in cfg.attention_layers):
        raise NotImplementedError(
            f"images of this {cfg.family} model, whose tokens see each other, are not supported in "
            "the engine; leave out images"
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
    whole = any(mixer.whole_images for mixer in cfg.attention_layers)
    if features is None or not whole:
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
    if visibility is None:
        visibility = jax.tree.map(as_given, separate_segments(segments))
    return dataclasses.replace(visibility, ahead=last)
