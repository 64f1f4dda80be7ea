"""Images of packed micro-batches as the inputs of a vision tower that is trained.

The tower runs inside of an update, once for each image of a micro-batch. Every data-parallel rank
has the patches of the images that its rows show first, so that its tokens bound their number.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

import sharding
from jaxrl.data.image_places import TEXT, PackedImages
from jaxrl.learner.image_encoder import ImageEncoder, in_order, n_features
from jaxrl.models.decoder import Decoder
from jaxrl.models.image_features import PackedPatches
from jaxrl.models.vision.patches import pack_patches
from jaxrl.types import Batch, ImageInput
from sharding import Rules

SMALL = 4  # the smaller of two programs has room for one feature in so many tokens


class TowerInputs:
    """Makes the patches of micro-batches; after an update, `encoder` has the new tower."""

    def __init__(self, encoder: ImageEncoder):
        self._encoder, self._cfg = encoder, encoder.cfg

    def follow(self, model: Decoder) -> None:
        """Computes features by the tower of the model from now on."""
        self._encoder.load(model.tower)

    def axis_positions(self, batch: Batch) -> np.ndarray | None:
        """As `ImageEncoder.axis_positions`."""
        return self._encoder.axis_positions(batch)

    def put(self, batch: Batch, rules: Rules) -> Batch:
        """The host batch with `PackedPatches` on the current mesh, whose rules are given."""
        n_rows, row_len = batch.tokens.shape
        packed = batch.images or PackedImages(np.full((n_rows, row_len), TEXT, np.int32), ())
        ranks = images_by_rank(packed, rules.n_shards("batch"))
        most = max(sum(n_features(self._cfg, image) for image in images) for images in ranks)
        n_each = next(n for n in self.sizes(n_rows, row_len, rules) if n >= most)
        found = self._patches(packed, ranks, n_each)
        patches = PackedPatches(
            rows=sharding.put_batch(found.rows, in_order(rules)),
            index=sharding.put_batch(found.index, rules),
        )
        axes = self.axis_positions(batch)
        return dataclasses.replace(batch, images=patches, axis_positions=axes)

    def on_host(self, batch: Batch) -> Batch:
        """As `put`, with all arrays on the host and room for images at all tokens.

        The batch has one row for each data-parallel rank, and places of images.
        """
        n_ranks, row_len = batch.tokens.shape
        ranks = images_by_rank(batch.images, n_ranks)
        patches = self._patches(batch.images, ranks, row_len)
        axes = self.axis_positions(batch)
        return dataclasses.replace(batch, images=patches, axis_positions=axes)

    def _patches(
        self, packed: PackedImages, ranks: Sequence[list[ImageInput]], n_each: int
    ) -> PackedPatches:
        """The patches of the images of each rank, which has room for so many features."""
        first: dict[str, int] = {}
        for rank, images in enumerate(ranks):
            ns = [n_features(self._cfg, image) for image in images]
            starts = rank * n_each + np.cumsum([0, *ns])
            first |= {i.digest: int(n) for i, n in zip(images, starts, strict=False)}
        rows = pack_patches(self._cfg, ranks, n_each * self._cfg.merge**2)
        rows = dataclasses.replace(rows, patches=rows.patches.astype(self._encoder.dtype))
        return PackedPatches(rows, packed.moved(first))

    def abstract(self, n_rows: int, row_len: int, rules: Rules) -> list[PackedPatches]:
        """The shapes of what `put` adds to a micro-batch, one for each of its sizes."""
        mesh, ranks = jax.sharding.get_mesh(), rules.n_shards("batch")
        at = NamedSharding(mesh, rules.spec("batch", "time"))

        def array(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=at)

        found = []
        for n in self.sizes(n_rows, row_len, rules):
            rows = pack_patches(self._cfg, [[]], n * self._cfg.merge**2)
            rows = dataclasses.replace(rows, patches=rows.patches.astype(self._encoder.dtype))
            shapes = jax.tree.map(lambda a: array((ranks, *a.shape[1:]), a.dtype), rows)
            found.append(PackedPatches(shapes, array((n_rows, row_len), np.dtype(np.int32))))
        return found

    def sizes(self, n_rows: int, row_len: int, rules: Rules) -> list[int]:
        """Features of a rank for which there are programs, ascending: the last are its tokens."""
        tokens, n_time = n_rows * row_len // rules.n_shards("batch"), rules.n_shards("time")
        small = -(-tokens // (SMALL * n_time)) * n_time
        return sorted({small, tokens})


BatchImages = ImageEncoder | TowerInputs  # what adds the images to a micro-batch


def images_by_rank(packed: PackedImages, n_ranks: int) -> list[list[ImageInput]]:
    """The images that the rows of each data-parallel rank show and no rank before it does."""
    ranks: list[list[ImageInput]] = [[] for _ in range(n_ranks)]
    rows_each = len(packed.index) // n_ranks
    for image, first in zip(packed.images, packed.first_rows.values(), strict=True):
        shown = (packed.index >= first) & (packed.index < first + image.n_tokens)
        if shown.any():
            ranks[int(np.argmax(shown.any(axis=1))) // rows_each].append(image)
    return ranks
