"""Features of the images of packed micro-batches, by a vision tower outside of their programs.

The tower runs once for an image, whatever the number of samples, passes and steps that read it, as
long as its weights stay; its features are kept in host memory. A micro-batch gets them at the
tokens of its images, so that its programs have one shape with and without images.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl.data.image_places import TEXT, PackedImages, by_axis
from jaxrl.layout import Layout
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder
from jaxrl.models.image_features import ImageFeatures
from jaxrl.models.spec import abstract_params
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.files import load_tower
from jaxrl.models.vision.patches import PatchRows, n_tokens, pack_patches
from jaxrl.models.vision.tower import Tower, tower_specs
from jaxrl.runtime.flat_program import FlatProgram, FlatTree, flatten
from jaxrl.types import Array, Batch, ImageInput, Tree
from sharding import Rules, hosts, mesh_order, put_batch, to_device

KEPT_BYTES = 2**32  # of the features that are kept in host memory
LEAST_PATCHES = 1024  # of a row of the tower


@dataclasses.dataclass(frozen=True)
class EncodedImage:
    """The features of an image on the host."""

    rows: np.ndarray  # [n_tokens, D]
    deep: np.ndarray | None = None  # [n_tokens, n, D]

    @property
    def n_bytes(self) -> int:
        return self.rows.nbytes + (0 if self.deep is None else self.deep.nbytes)


class ImageEncoder:
    """Computes and keeps features by the tower of a model folder, on the mesh of training."""

    def __init__(
        self,
        folder: Path,
        cfg: TowerConfig,
        decoder: DecoderConfig,
        rules: Rules,
        dtype: jnp.dtype,
        kept_bytes: int = KEPT_BYTES,
    ):
        """`decoder` is the language model's config. `load` gives it the weights."""
        self.cfg, self.dtype = cfg, dtype
        self._folder, self._rules, self._mesh = folder, rules, jax.sharding.get_mesh()
        self._decoder = decoder
        self._program = FlatProgram(functools.partial(encode, rules=rules))
        self._tower: FlatTree | None = None
        self._kept_bytes = kept_bytes
        self._kept: dict[str, EncodedImage] = {}  # by digest, the one that was read last at the end

    def load(self, tower: Tower | None = None) -> None:
        """Takes a tower in the encoder's sharding, or reads that of the folder.

        The features of an earlier tower are dropped.
        """
        self._kept = {}
        if tower is not None:
            self._tower = flatten(to_device(tower))
            return
        with jax.set_mesh(self._mesh):
            self._tower = flatten(load_tower(self._folder, rules=self._rules, dtype=self.dtype)[1])

    def follow(self, model: Decoder) -> None:
        """Nothing: an update of the model does not change the tower."""

    def another(self, decoder: DecoderConfig, layout: Layout | None = None) -> "ImageEncoder":
        """An encoder for a model with another tower, in the layout of a role or the same one."""
        rules, cfg = self._rules if layout is None else layout.rules, decoder.tower or self.cfg
        with jax.set_mesh(self._mesh) if layout is None else layout.on_mesh():
            return ImageEncoder(self._folder, cfg, decoder, rules, self.dtype, self._kept_bytes)

    def abstract_tower(self) -> Tree:
        """The shapes of its weights."""
        return abstract_params(tower_specs(self.cfg), self._rules, self.dtype, self._mesh)

    def encode(self, images: Sequence[ImageInput]) -> list[EncodedImage]:
        """The features of each image. Those that are not kept are computed together."""
        missing = [image for image in images if image.digest not in self._kept]
        found = dict(self._kept)
        for rows, n_patches in self._calls(missing):
            found |= self._run(rows, n_patches)
        read = {image.digest: found[image.digest] for image in images}
        others = {digest: one for digest, one in self._kept.items() if digest not in read}
        self._kept = _newest(others | read, self._kept_bytes)
        return [read[image.digest] for image in images]

    def put(self, batch: Batch, rules: Rules) -> Batch:
        """The host batch with `ImageFeatures` on the current mesh, whose rules are given.

        Its positions by axis are those of text where it has none, if the model has them.
        """
        packed = batch.images or PackedImages(np.full(batch.tokens.shape, TEXT, np.int32), ())
        tables = self._tables(packed.images)
        places: np.ndarray = mesh_order(packed.index, rules)
        sharding = NamedSharding(jax.sharding.get_mesh(), rules.spec("batch", "time"))

        def put_rows(table: np.ndarray) -> jax.Array:
            """[B, T, ...]; each device gets the rows of its tokens."""

            def rows_at(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None, "every process passes all rows"
                return table[places[index[:2]] + 1]

            shape = *places.shape, *table.shape[1:]
            return jax.make_array_from_callback(shape, sharding, rows_at)

        rows, deep = jax.tree.map(put_rows, tables)
        features = ImageFeatures(rows, put_batch(packed.index != TEXT, rules), deep)
        axes = self.axis_positions(batch)
        return dataclasses.replace(batch, images=features, axis_positions=axes)

    def on_host(self, batch: Batch) -> Batch:
        """As `put`, with all arrays on the host; the batch has places of images."""
        packed: PackedImages = batch.images
        tables = self._tables(packed.images)
        rows, deep = jax.tree.map(lambda table: table[packed.index + 1], tables)
        features = ImageFeatures(rows, packed.index != TEXT, deep)
        axes = self.axis_positions(batch)
        return dataclasses.replace(batch, images=features, axis_positions=axes)

    def _tables(self, images: Sequence[ImageInput]) -> tuple[np.ndarray, np.ndarray | None]:
        """The features [1 + F, D] of all images one after the other, and deep ones [1 + F, n, D].

        The first row is that of text, zeros.
        """
        encoded, n, D = self.encode(images), len(self.cfg.deepstack), self.cfg.out_D

        def table(parts: Sequence[np.ndarray], *shape: int) -> np.ndarray:
            return np.concatenate([np.zeros((1, *shape), self.dtype), *parts])

        deep = [one.deep for one in encoded if one.deep is not None]
        return table([one.rows for one in encoded], D), table(deep, n, D) if n else None

    def abstract(self, n_rows: int, row_len: int, rules: Rules) -> list[ImageFeatures]:
        """The shapes of what `put` adds to a micro-batch on the current mesh; there is one."""
        mesh, n, D = jax.sharding.get_mesh(), len(self.cfg.deepstack), self.cfg.out_D
        sharding = NamedSharding(mesh, rules.spec("batch", "time"))

        def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((n_rows, row_len, *shape), dtype, sharding=sharding)

        deep = array(self.dtype, n, D) if n else None
        return [ImageFeatures(array(self.dtype, D), array(bool), deep)]

    def axis_positions(self, batch: Batch) -> np.ndarray | None:
        """int32 [B, T, 3], those of text where the batch has none; None if the model has none."""
        axes, mixers = batch.axis_positions, self._decoder.paged_layers
        has_axes = any(mixer.rope.mrope_section for mixer in mixers)
        return by_axis(batch.positions) if axes is None and has_axes else axes

    def _calls(self, images: Sequence[ImageInput]) -> Iterator[tuple[list[list[ImageInput]], int]]:
        """(rows of images, patches of a row): a row for each data-parallel rank."""
        n_rows = self._rules.n_shards("batch")
        left = sorted({i.digest: i for i in images}.values(), key=_n_patches, reverse=True)
        while left:
            n_patches = max(LEAST_PATCHES, 1 << (_n_patches(left[0]) - 1).bit_length())
            rows: list[list[ImageInput]] = [[] for _ in range(n_rows)]
            rest = []
            for image in left:
                row = min(rows, key=_n_patches_of)
                fits = _n_patches_of(row) + _n_patches(image) <= n_patches
                (row if fits else rest).append(image)
            yield rows, n_patches
            left = rest

    def _run(self, rows: list[list[ImageInput]], n_patches: int) -> dict[str, EncodedImage]:
        inputs = pack_patches(self.cfg, rows, n_patches)
        with jax.set_mesh(self._mesh):
            found = self._program(self._tower, put_batch(inputs, in_order(self._rules)))
        out, *deep = (hosts.host_array(one) for one in found)
        encoded: dict[str, EncodedImage] = {}
        for b, images in enumerate(rows):
            start = 0
            for image in images:
                at = slice(start, start + n_features(self.cfg, image))
                layers = [one[b, at] for one in deep]
                # Copies, because a slice would keep the whole array.
                encoded[image.digest] = EncodedImage(
                    out[b, at].copy(), np.stack(layers, axis=1) if layers else None
                )
                start = at.stop
        return encoded


def encode(tower: Tower, rows: PatchRows, *, rules: Rules) -> tuple[Array, ...]:
    """Features of the tokens of all images, and those for the decoder's first layers."""
    out, deep = tower(rows, rules=rules)
    return out, *deep


def n_features(cfg: TowerConfig, image: ImageInput) -> int:
    """Features of an image. Raises ValueError if its prompt has another number of tokens for it."""
    n = n_tokens(cfg, image.grid)
    if n != image.n_tokens:
        raise ValueError(
            f"an image of the grid {image.grid} has {image.n_tokens} tokens in the prompt and {n} "
            "features; use the image processor of the model's folder"
        )
    return n


def in_order(rules: Rules) -> Rules:
    """The rules of rows of patches, which are in the same order on every mesh."""
    return dataclasses.replace(rules, ring=False)


def _n_patches(image: ImageInput) -> int:
    frames, height, width = image.grid
    return frames * height * width


def _n_patches_of(row: Sequence[ImageInput]) -> int:
    return sum(map(_n_patches, row))


def _newest(kept: dict[str, EncodedImage], n_bytes: int) -> dict[str, EncodedImage]:
    """The last entries that need at most so many bytes together."""
    found: dict[str, EncodedImage] = {}
    for digest, one in reversed(kept.items()):
        n_bytes -= one.n_bytes
        if n_bytes < 0:
            break
        found[digest] = one
    return dict(reversed(found.items()))
